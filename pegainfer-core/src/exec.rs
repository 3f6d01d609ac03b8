//! Execution context of ops: a device, its threads, scratch memory and the recorder.

mod activations;
mod attached;
mod idle;
mod moment;
mod tensors;

pub use activations::Activations;
pub use idle::keep_gpus_open;
pub use tensors::AliasedTensor;

use crate::cuda::{Cuda, Graph};
use crate::isa::Isa;
use crate::record::OpRecord;
use crate::scratch::Scratch;
use crate::team::Team;
use crate::tensor::OpError;
use attached::Attached;
use idle::IdleGpu;
use moment::Moment;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::any::Any;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The device that ops dispatch on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The CPU reference kernels, with this instruction set.
    Cpu(Isa),
    /// An NVIDIA GPU.
    Cuda,
    /// Shapes only: ops check and record, and compute nothing. Tensors have no storage, so models of any size fit.
    Meta,
}

/// Execution context, the first argument of every op. One per engine thread.
#[derive(Debug)]
pub struct Exec {
    device: Device,
    /// Runs host work such as reading files.
    pool: Arc<ThreadPool>,
    /// Runs the loops of CPU kernels.
    team: Arc<Team>,
    /// Values of other crates; dropped before the GPU, which they may use.
    attached: Attached,
    /// Set on `Device::Cuda`.
    cuda: Option<Cuda>,
    /// The record of each op and when the op began. `None` while nothing is recorded.
    records: Option<Vec<(OpRecord, Moment)>>,
    /// True if ops are timed: on a GPU, records then use times of its stream instead of host times.
    times_ops: bool,
    /// Fault injection: an op, and the extra microseconds of each call.
    slow_op: Option<(&'static str, &'static AtomicU64)>,
    next_tensor: u32,
    activations: Activations,
    /// Bytes of all tensors so far.
    allocated: u64,
    /// Scratch memory of CPU kernels; it grows to the largest request and is never freed in the step loop.
    pub scratch: Scratch,
}

impl Exec {
    /// A CPU context with `threads` threads, or with one per core available to this process.
    pub fn cpu(isa: Isa, threads: Option<usize>) -> io::Result<Self> {
        Self::new(Device::Cpu(isa), threads, None, Attached::default())
    }

    /// A context for GPU `ordinal`, with `threads` host threads for host work such as loading: one that was
    /// [kept open](keep_gpus_open), with its attached values, or a new one.
    pub fn cuda(ordinal: usize, threads: Option<usize>) -> io::Result<Self> {
        let IdleGpu { attached, cuda } = match idle::take(ordinal) {
            Some(gpu) => gpu,
            None => IdleGpu { attached: Attached::default(), cuda: Cuda::open(ordinal).map_err(io::Error::other)? },
        };
        Self::new(Device::Cuda, threads, Some(cuda), attached)
    }

    /// A shape-only context.
    pub fn meta() -> io::Result<Self> {
        Self::new(Device::Meta, Some(1), None, Attached::default())
    }

    fn new(device: Device, threads: Option<usize>, cuda: Option<Cuda>, attached: Attached) -> io::Result<Self> {
        let threads = match threads {
            Some(n) => n.max(1),
            None => std::thread::available_parallelism().map_or(1, usize::from),
        };
        let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("cpu-{i}")).build();
        let pool = Arc::new(pool.map_err(io::Error::other)?);
        let team = Arc::new(Team::new(threads)?);
        Ok(Self {
            device,
            pool,
            team,
            attached,
            cuda,
            records: None,
            times_ops: false,
            slow_op: None,
            next_tensor: 0,
            activations: Activations::default(),
            allocated: 0,
            scratch: Scratch::default(),
        })
    }

    /// The device that ops dispatch on.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Activations of GEMMs with group-quantised weights.
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// Chooses [`activations`](Self::activations); [`Activations::Exact`] before the first call.
    pub fn set_activations(&mut self, activations: Activations) {
        self.activations = activations;
    }

    /// The GPU; an error on other devices.
    pub fn gpu(&mut self) -> Result<&mut Cuda, OpError> {
        let missing = || OpError { op: "cuda", message: "this Exec has no GPU".to_owned() };
        self.cuda.as_mut().ok_or_else(missing)
    }

    /// The attached value of type `T`, created by `make` if there is none: a library or a table of kernels that lives
    /// as long as the device is open. Attached values are dropped before the device.
    pub fn attached<T: Any + Send>(&mut self, make: impl FnOnce(&mut Self) -> T) -> &mut T {
        if self.attached.get::<T>().is_none() {
            let value = make(self);
            self.attach(value);
        }
        self.attached.get().expect("it was attached above")
    }

    /// Attaches a value in place of one of its type.
    pub fn attach<T: Any + Send>(&mut self, value: T) {
        self.attached.set(value);
    }

    /// Total size in bytes of all tensors allocated with their own storage, including dropped ones. On `Meta`: the
    /// memory that a model would take.
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated
    }

    /// Number of host threads.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// Runs `f` in the context from which ops are called, once per step of an executor. On the CPU, loops of kernels
    /// run on the team; on a GPU, the calling thread is bound to it.
    pub fn install<R>(&mut self, f: impl FnOnce(&mut Self) -> R) -> Result<R, OpError> {
        if let Some(cuda) = &self.cuda {
            cuda.bind()?;
            return Ok(f(self));
        }
        Ok(self.team.clone().install(|| f(self)))
    }

    /// Waits until the device has completed everything that was launched, and returns its errors. After an error, the
    /// device is lost.
    pub fn synchronize(&self) -> Result<(), OpError> {
        let Some(cuda) = &self.cuda else { return Ok(()) };
        cuda.bind()?;
        cuda.synchronize("synchronize")
    }

    /// Runs `f` on the host threads, on any device: rayon's loops on the pool, loops of kernels on the team.
    pub fn on_host<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        let team = &self.team;
        self.pool.install(|| team.install(f))
    }

    /// Creates up to `count` side streams of a GPU for [`on_side_stream`](Self::on_side_stream), with 160 MB of device
    /// memory each. No effect on other devices.
    pub fn open_side_streams(&mut self, count: usize) -> Result<(), OpError> {
        self.cuda.as_mut().map_or(Ok(()), |cuda| cuda.streams().open(count))
    }

    /// Runs the ops that `f` calls on side stream `side`. They start after all earlier launches and run concurrently
    /// with later ones until [`join_side_streams`](Self::join_side_streams), which must follow. The ops must be
    /// kernels, not copies, and must not share a tensor that either side writes. If there is no such stream or ops are
    /// timed, they run in order like other ops.
    pub fn on_side_stream<R>(
        &mut self,
        side: usize,
        f: impl FnOnce(&mut Self) -> Result<R, OpError>,
    ) -> Result<R, OpError> {
        let entered = match self.cuda.as_mut().filter(|_| !self.times_ops) {
            Some(cuda) => cuda.streams().enter(side)?,
            None => false,
        };
        let result = f(self);
        if let Some(cuda) = self.cuda.as_mut().filter(|_| entered) {
            cuda.streams().leave();
        }
        result
    }

    /// Creates `count` streams of a GPU for [`on_copy_stream`](Self::on_copy_stream).
    pub fn open_copy_streams(&mut self, count: usize) -> Result<(), OpError> {
        self.gpu()?.streams().open_copies(count)
    }

    /// Makes later work of the streams for copies wait for the work of the main stream.
    pub fn start_copies(&mut self) -> Result<(), OpError> {
        self.gpu()?.bind()?;
        self.gpu()?.streams().start_copies()
    }

    /// Runs the ops that `f` calls on this stream for copies, beside all others: they must not share memory that either
    /// side writes. Ops without a workspace only.
    pub fn on_copy_stream<R>(
        &mut self,
        stream: usize,
        f: impl FnOnce(&mut Self) -> Result<R, OpError>,
    ) -> Result<R, OpError> {
        self.gpu()?.streams().enter_copies(stream);
        let result = f(self);
        self.gpu()?.streams().leave();
        result
    }

    /// Makes later launches wait for the ops on side streams.
    pub fn join_side_streams(&mut self) -> Result<(), OpError> {
        self.cuda.as_mut().map_or(Ok(()), |cuda| cuda.streams().join())
    }

    /// Captures launches on the GPU instead of running them until [`end_capture`](Self::end_capture), which must
    /// follow. Captured launches must not allocate, copy from or to the host, synchronise, or use a kernel for the
    /// first time.
    pub fn begin_capture(&mut self) -> Result<(), OpError> {
        self.gpu()?.begin_capture()
    }

    /// Ends the capture and returns the graph.
    pub fn end_capture(&mut self) -> Result<Graph, OpError> {
        self.gpu()?.end_capture()
    }

    /// Launches a captured graph, after everything that was launched before.
    pub fn replay(&mut self, graph: &Graph) -> Result<(), OpError> {
        self.gpu()?.replay(graph)
    }

    /// True if ops are recorded.
    pub fn is_recording(&self) -> bool {
        self.records.is_some()
    }

    /// Adds the record of an op; built only while recording.
    pub fn record(&mut self, record: impl FnOnce(Device) -> OpRecord) {
        if self.records.is_none() && self.slow_op.is_none() {
            return;
        }
        let (record, began) = (record(self.device), Moment::now(self.cuda.as_ref().filter(|_| self.times_ops)));
        if let Some((_, time)) = self.slow_op.filter(|(op, _)| *op == record.op) {
            match &self.cuda {
                Some(cuda) => cuda.sleep(time),
                None => std::thread::sleep(Duration::from_micros(time.load(Ordering::Relaxed))),
            }
        }
        if let Some(records) = &mut self.records {
            records.push((record, began));
        }
    }

    /// Fault injection: adds `time` to each later call of `op`, and of no other op. A CUDA graph follows later changes
    /// if it was captured while that op was already named here, with any time.
    pub fn slow_down(&mut self, op: &'static str, time: Duration) {
        let micros = match self.slow_op {
            Some((slow, micros)) if slow == op => micros,
            // Graphs refer to it for as long as they are replayed.
            _ => Box::leak(Box::default()),
        };
        micros.store(time.as_micros() as u64, Ordering::Relaxed);
        self.slow_op = Some((op, micros));
    }

    /// Makes a GPU wait for the microseconds in `time` before later launches, so that the host launches ahead of it. No
    /// effect on other devices.
    pub fn delay(&self, time: &'static AtomicU64) {
        if let Some(cuda) = &self.cuda {
            cuda.sleep(time);
        }
    }

    /// Starts to keep the record of every op.
    pub fn start_recording(&mut self) {
        self.records = Some(Vec::new());
    }

    /// Variant of [`start_recording`](Self::start_recording) for [`stop_timed_recording`](Self::stop_timed_recording).
    /// On a GPU each op starts after the earlier ones have ended.
    pub fn start_timed_recording(&mut self) {
        self.start_recording();
        self.times_ops = true;
    }

    /// True if ops are recorded with their times.
    pub fn is_timing(&self) -> bool {
        self.times_ops
    }

    /// Stops recording; returns the records since [`start_recording`](Self::start_recording).
    pub fn stop_recording(&mut self) -> Vec<OpRecord> {
        self.records.take().into_iter().flatten().map(|(record, _)| record).collect()
    }

    /// Variant of [`stop_recording`](Self::stop_recording) with the time of each op: until the next one starts, for the
    /// last one until all have ended. Waits for the device.
    pub fn stop_timed_recording(&mut self) -> Result<Vec<(OpRecord, Duration)>, OpError> {
        let mut end = Moment::now(self.cuda.as_ref().filter(|_| self.times_ops));
        let records = self.records.take().unwrap_or_default();
        self.times_ops = false;
        let mut timed = Vec::with_capacity(records.len());
        for (record, began) in records.into_iter().rev() {
            timed.push((record, end.since(&began)?));
            end = began;
        }
        timed.reverse();
        Ok(timed)
    }

    /// Runs `f` without recording: for an op that consists of other ops and records itself.
    pub fn unrecorded<R>(&mut self, f: impl FnOnce(&mut Self) -> R) -> R {
        let records = self.records.take();
        let result = f(self);
        self.records = records;
        result
    }

    /// Runs `f` and returns the records of all ops that it calls.
    pub fn recording<R>(&mut self, f: impl FnOnce(&mut Self) -> R) -> (R, Vec<OpRecord>) {
        self.start_recording();
        let result = f(self);
        (result, self.stop_recording())
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        if let Some(cuda) = self.cuda.take() {
            idle::keep(IdleGpu { attached: std::mem::take(&mut self.attached), cuda });
        }
    }
}
