//! Where ops run: a device, its threads, a scratch area and the recorder.

use crate::cuda::{self, Cuda, Graph, Target};
use crate::isa::Isa;
use crate::record::OpRecord;
use crate::scratch::Scratch;
use crate::tensor::{DType, Element, OpError, Storage, Tensor};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// What an op dispatches on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The CPU twins, on this instruction set.
    Cpu(Isa),
    /// An NVIDIA GPU.
    Cuda,
    /// Shapes only: ops check and record, and compute nothing. Tensors have no bytes, so any model fits.
    Meta,
}

/// The execution context that every op takes first. One per engine thread.
#[derive(Debug)]
pub struct Exec {
    device: Device,
    pool: Arc<ThreadPool>,
    /// Present on `Device::Cuda`.
    cuda: Option<Cuda>,
    records: Option<Vec<OpRecord>>,
    next_tensor: u32,
    /// Working memory of kernels; grows to the largest need and is never returned in the step loop.
    pub scratch: Scratch,
}

impl Exec {
    /// The CPU with `threads` threads, or with one per core available to this process.
    pub fn cpu(isa: Isa, threads: Option<usize>) -> io::Result<Self> {
        Self::new(Device::Cpu(isa), threads, None)
    }

    /// GPU `ordinal`, with `threads` host threads for what the host does, such as loading.
    pub fn cuda(ordinal: usize, threads: Option<usize>) -> io::Result<Self> {
        let cuda = Cuda::open(ordinal).map_err(io::Error::other)?;
        Self::new(Device::Cuda, threads, Some(cuda))
    }

    /// The shape-only device.
    pub fn meta() -> io::Result<Self> {
        Self::new(Device::Meta, Some(1), None)
    }

    fn new(device: Device, threads: Option<usize>, cuda: Option<Cuda>) -> io::Result<Self> {
        let threads = match threads {
            Some(n) => n.max(1),
            None => std::thread::available_parallelism().map_or(1, usize::from),
        };
        let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("cpu-{i}")).build();
        let pool = Arc::new(pool.map_err(io::Error::other)?);
        Ok(Self { device, pool, cuda, records: None, next_tensor: 0, scratch: Scratch::default() })
    }

    /// The device ops dispatch on.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The GPU; an error on another device.
    pub fn gpu(&mut self) -> Result<&mut Cuda, OpError> {
        let missing = || OpError { op: "cuda", message: "this Exec has no GPU".to_owned() };
        self.cuda.as_mut().ok_or_else(missing)
    }

    /// Threads of the host.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Runs `f` where the device's ops are called from. A step of an executor is one call. On the CPU that is its
    /// thread pool, so that parallel kernels start without waking another; on a GPU the calling thread, bound to it.
    pub fn install<R: Send>(&mut self, f: impl FnOnce(&mut Self) -> R + Send) -> Result<R, OpError> {
        if let Some(cuda) = &self.cuda {
            cuda.bind()?;
            return Ok(f(self));
        }
        Ok(self.pool.clone().install(|| f(self)))
    }

    /// Waits until the device has done everything that was launched; says if something went wrong in it. A device that
    /// fails here is lost.
    pub fn synchronize(&self) -> Result<(), OpError> {
        let Some(cuda) = &self.cuda else { return Ok(()) };
        cuda.bind()?;
        cuda.synchronize("synchronize")
    }

    /// Runs `f` on the host's threads, whatever the device.
    pub fn on_host<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        self.pool.install(f)
    }

    /// A zero-filled tensor on this device.
    pub fn tensor(&mut self, name: &str, shape: &[usize], dtype: DType) -> io::Result<Tensor> {
        let id = self.next_tensor;
        self.next_tensor += 1;
        let bytes = shape.iter().product::<usize>() * dtype.size();
        let storage = match (&self.cuda, self.device) {
            (Some(cuda), _) => Storage::Device(Arc::new(cuda.zeroed(bytes).map_err(io::Error::other)?), 0),
            (None, Device::Meta) => Storage::Meta,
            (None, _) => Storage::host(bytes)?,
        };
        Ok(Tensor::new(name, id, shape, dtype, storage))
    }

    /// Zero-filled tensors of these names and shapes. On a GPU they lie at equal distances in one buffer, so that one copy
    /// fills them: see [`fill_adjacent`](Self::fill_adjacent).
    pub fn adjacent<const N: usize>(
        &mut self,
        tensors: [(&str, &[usize]); N],
        dtype: DType,
    ) -> io::Result<[Tensor; N]> {
        let elements = tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).max().unwrap_or(0);
        let distance = (elements * dtype.size()).next_multiple_of(256);
        let shared = self.cuda.as_ref().map(|cuda| cuda.zeroed(N * distance).map(Arc::new).map_err(io::Error::other));
        let shared = shared.transpose()?;
        let tensor = |(i, (name, shape)): (usize, (&str, &[usize]))| {
            let Some(buffer) = &shared else { return self.tensor(name, shape, dtype) };
            self.next_tensor += 1;
            let storage = Storage::Device(buffer.clone(), i * distance);
            Ok(Tensor::new(name, self.next_tensor - 1, shape, dtype, storage))
        };
        let tensors: Vec<Tensor> = tensors.into_iter().enumerate().map(tensor).collect::<io::Result<_>>()?;
        tensors.try_into().map_err(|_| io::Error::other("one tensor for each name"))
    }

    /// Writes `range` of the elements of `tensor`: `fill(first, piece)` gives the elements that begin at `first` of the
    /// range, on the host's threads. A GPU is fed in pieces that begin at multiples of 65,536 elements; otherwise there
    /// is one piece. Nothing happens on `Meta`.
    pub fn write<T: Element>(
        &mut self,
        tensor: &mut Tensor,
        range: Range<usize>,
        fill: impl Fn(usize, &mut [T]) + Sync,
    ) -> Result<(), OpError> {
        assert!(tensor.dtype() == T::DTYPE && range.end <= tensor.elements(), "{}", tensor.name());
        let pool = self.pool.clone();
        let fill = |first: usize, piece: &mut [T]| pool.install(|| fill(first, piece));
        match (&mut self.cuda, self.device) {
            (Some(cuda), _) => {
                cuda.bind()?;
                let address = tensor.device() + (range.start * size_of::<T>()) as u64;
                cuda.upload(address, range.len(), fill).map_err(cuda::error("upload"))?;
            }
            (None, Device::Meta) => {}
            (None, _) => fill(0, &mut tensor.host_mut()[range]),
        }
        Ok(())
    }

    /// Fills `targets` on the GPU and waits for it. `fill(i, first, bytes)` gives the bytes of target `i` that begin at
    /// byte `first`, for pieces in no particular order, on the host's threads. Nothing happens without targets.
    pub(crate) fn upload<E: From<OpError> + Send>(
        &mut self,
        targets: &[Target],
        fill: impl Fn(usize, usize, &mut [u8]) -> Result<(), E> + Send + Sync,
    ) -> Result<(), E> {
        if targets.is_empty() {
            return Ok(());
        }
        let pool = self.pool.clone();
        let gpu = self.gpu()?;
        pool.install(|| gpu.upload_all(targets, fill))
    }

    /// Copies `values` in and sets the leading dimension to fit; the other dimensions stay. On a GPU the copy is
    /// asynchronous, and `values` may be reused at once.
    pub fn fill_rows<T: Element>(&mut self, tensor: &mut Tensor, values: &[T]) -> Result<(), OpError> {
        let cols = tensor.rows_cols().1;
        tensor.set_rows(values.len() / cols.max(1));
        self.write_packed(tensor, values)
    }

    /// As [`fill_rows`](Self::fill_rows) for all the tensors of one [`adjacent`](Self::adjacent), in its order, at least
    /// two. On a GPU that is one copy; what lies behind the values of a tensor is undefined afterwards.
    pub fn fill_adjacent<const N: usize, T: Element>(
        &mut self,
        mut tensors: [&mut Tensor; N],
        values: [&[T]; N],
    ) -> Result<(), OpError> {
        let Some(cuda) = &mut self.cuda else {
            let mut pairs = tensors.into_iter().zip(values);
            return pairs.try_for_each(|(tensor, values)| self.fill_rows(tensor, values));
        };
        for (tensor, values) in tensors.iter_mut().zip(values) {
            tensor.set_rows(values.len() / tensor.rows_cols().1.max(1));
        }
        let width = values.iter().map(|values| values.len()).max().unwrap_or(0);
        let tensors = tensors.map(|tensor| &*tensor);
        let (first, second) = (tensors[0].device(), tensors[1].device());
        for (i, tensor) in tensors.into_iter().enumerate() {
            let in_place = tensor.device() == first + i as u64 * (second - first);
            assert!(in_place && tensor.dtype() == T::DTYPE, "{} is not adjacent", tensor.name());
        }
        let fill = |row: usize, to: &mut [T]| to[..values[row].len()].copy_from_slice(values[row]);
        let stride = (second - first) as usize / size_of::<T>();
        cuda.upload_columns(first, (N, width, stride), fill).map_err(cuda::error("upload"))
    }

    /// Copies packed rows of `width` elements to the front of each row; the rest of a row stays. Sets the leading
    /// dimension to fit.
    pub fn fill_columns<T: Element>(&mut self, tensor: &mut Tensor, width: usize, values: &[T]) -> Result<(), OpError> {
        let stride = tensor.rows_cols().1;
        assert!(width <= stride && tensor.dtype() == T::DTYPE, "{}", tensor.name());
        let rows = values.len() / width.max(1);
        tensor.set_rows(rows);
        match (&mut self.cuda, self.device) {
            (Some(cuda), _) => {
                let fill = |row: usize, to: &mut [T]| to.copy_from_slice(&values[row * width..][..width]);
                cuda.upload_columns(tensor.device(), (rows, width, stride), fill).map_err(cuda::error("upload"))
            }
            (None, Device::Meta) => Ok(()),
            (None, _) => {
                let rows = tensor.host_mut::<T>().chunks_exact_mut(stride).zip(values.chunks_exact(width.max(1)));
                rows.for_each(|(to, from)| to[..width].copy_from_slice(from));
                Ok(())
            }
        }
    }

    fn write_packed<T: Element>(&mut self, tensor: &mut Tensor, values: &[T]) -> Result<(), OpError> {
        assert_eq!(tensor.dtype(), T::DTYPE, "{}", tensor.name());
        match (&mut self.cuda, self.device) {
            (Some(cuda), _) => {
                let copy = |first: usize, piece: &mut [T]| piece.copy_from_slice(&values[first..][..piece.len()]);
                cuda.upload(tensor.device(), values.len(), copy).map_err(cuda::error("upload"))
            }
            (None, Device::Meta) => Ok(()),
            (None, _) => {
                tensor.host_mut::<T>().copy_from_slice(values);
                Ok(())
            }
        }
    }

    /// Copies elements of `tensor`, from element `first` on, to `out`; waits for a GPU. On `Meta` `out` stays.
    pub fn read<T: Element>(&self, tensor: &Tensor, first: usize, out: &mut [T]) -> Result<(), OpError> {
        assert!(tensor.dtype() == T::DTYPE && first + out.len() <= tensor.elements(), "{}", tensor.name());
        match (&self.cuda, self.device) {
            (Some(cuda), _) => {
                let address = tensor.device() + (first * size_of::<T>()) as u64;
                cuda.download(address, out).map_err(cuda::error("read"))
            }
            (None, Device::Meta) => Ok(()),
            (None, _) => {
                out.copy_from_slice(&tensor.host()[first..][..out.len()]);
                Ok(())
            }
        }
    }

    /// From here on launches on the GPU are captured and not run, until [`end_capture`](Self::end_capture), which must
    /// follow. None of them may allocate, copy from or to the host, wait, or use a kernel for the first time.
    pub fn begin_capture(&mut self) -> Result<(), OpError> {
        self.gpu()?.begin_capture()
    }

    /// Ends the capture and makes a graph of it.
    pub fn end_capture(&mut self) -> Result<Graph, OpError> {
        self.gpu()?.end_capture()
    }

    /// Runs a captured graph behind what was launched before.
    pub fn replay(&mut self, graph: &Graph) -> Result<(), OpError> {
        self.gpu()?.replay(graph)
    }

    /// Whether ops report.
    pub fn is_recording(&self) -> bool {
        self.records.is_some()
    }

    /// Takes an op's report; builds it only while recording.
    pub fn record(&mut self, report: impl FnOnce(Device) -> OpRecord) {
        if let Some(records) = &mut self.records {
            records.push(report(self.device));
        }
    }

    /// Keeps the report of every op from now on.
    pub fn start_recording(&mut self) {
        self.records = Some(Vec::new());
    }

    /// The reports since [`start_recording`](Self::start_recording).
    pub fn stop_recording(&mut self) -> Vec<OpRecord> {
        self.records.take().unwrap_or_default()
    }

    /// Runs `f` without reports: for an op that is made of others and reports itself.
    pub fn unrecorded<R>(&mut self, f: impl FnOnce(&mut Self) -> R) -> R {
        let records = self.records.take();
        let result = f(self);
        self.records = records;
        result
    }

    /// The records of every op that `f` calls.
    pub fn recording<R>(&mut self, f: impl FnOnce(&mut Self) -> R) -> (R, Vec<OpRecord>) {
        self.start_recording();
        let result = f(self);
        (result, self.stop_recording())
    }
}
