//! Ranks on GPUs that exchange through NCCL: the fallback if GPUs cannot access each other's memory, and the reference
//! for our collectives. Sums are not added in rank order.

mod library;

use crate::cuda::collectives::Algorithm;
use library::{BF16, F32, Handle, Library, SUM};
use pegainfer_core::cuda::Cuda;
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::{
    Communicator, aborted, record_all_gather, record_all_gather_rows, record_all_reduce, record_reduce_scatter,
    rows_of_rank,
};
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Name of the kernels in records.
const KERNEL: &str = "nccl";

/// One rank's end.
pub struct Nccl {
    library: Arc<Library>,
    /// `ncclComm_t`; null once it is aborted.
    handle: AtomicPtr<c_void>,
    rank: usize,
    ranks: usize,
}

impl Nccl {
    /// Communicators of the ranks on `gpus`, which must be different ones.
    pub fn connect(gpus: &[&Cuda]) -> Result<Vec<Self>, OpError> {
        let fail = |message| OpError { op: "connect", message };
        let library = Arc::new(Library::open().map_err(fail)?);
        let devices: Vec<c_int> = gpus.iter().map(|gpu| gpu.ordinal() as c_int).collect();
        let mut handles: Vec<Handle> = vec![std::ptr::null_mut(); devices.len()];
        // SAFETY: reads and writes as many elements as there are devices.
        let status =
            unsafe { (library.functions.init_all)(handles.as_mut_ptr(), devices.len() as c_int, devices.as_ptr()) };
        library.check(status).map_err(fail)?;
        log::debug!("NCCL {}", library.version());
        let ranks = gpus.len();
        let end = |(rank, handle)| Self { library: library.clone(), handle: AtomicPtr::new(handle), rank, ranks };
        Ok(handles.into_iter().enumerate().map(end).collect())
    }

    fn handle(&self) -> Result<Handle, OpError> {
        let handle = self.handle.load(Ordering::Acquire);
        if handle.is_null() { Err(aborted()) } else { Ok(handle) }
    }

    fn checked(&self, op: &'static str, status: c_int) -> Result<(), OpError> {
        self.library.check(status).map_err(|message| OpError { op, message })
    }
}

fn dtype(tensor: &Tensor) -> c_int {
    if tensor.dtype() == DType::F32 { F32 } else { BF16 }
}

impl Communicator for Nccl {
    fn all_reduce(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
        // A lower bound, for a ring: the library chooses the algorithm.
        let sent = Algorithm::TwoShot.sent(self.ranks, x.bytes() as usize);
        record_all_reduce(exec, KERNEL, x, self.ranks, sent);
        let (op, handle, gpu) = ("all_reduce", self.handle()?, exec.gpu()?);
        gpu.library_kernel(op, x);
        let (data, stream) = (x.device() as *mut c_void, gpu.stream().cu_stream().cast());
        // SAFETY: handle, stream and the elements of `x` are alive; NCCL adds in place.
        let status =
            unsafe { (self.library.functions.all_reduce)(data, data, x.elements(), dtype(x), SUM, handle, stream) };
        self.checked(op, status)
    }

    /// Row by row: the parts of a row are adjacent in the result.
    fn all_gather(&self, exec: &mut Exec, part: &Tensor, whole: &mut Tensor) -> Result<(), OpError> {
        record_all_gather(exec, KERNEL, part, whole, self.ranks);
        let (op, handle, gpu) = ("all_gather", self.handle()?, exec.gpu()?);
        gpu.library_kernel(op, whole);
        let ((rows, columns), row_bytes) =
            (part.rows_cols(), (whole.bytes() as usize).checked_div(whole.rows_cols().0));
        let stream = gpu.stream().cu_stream().cast();
        let functions = &self.library.functions;
        // SAFETY: takes no arguments.
        self.checked(op, unsafe { (functions.group_start)() })?;
        let send = |row: usize| {
            let from = part.device() + (row * columns * size_of::<f32>()) as u64;
            let to = whole.device() + (row * row_bytes.unwrap_or(0)) as u64;
            // SAFETY: handle, stream and both rows are alive.
            let status = unsafe {
                (functions.all_gather)(from as *const c_void, to as *mut c_void, columns, F32, handle, stream)
            };
            self.checked(op, status)
        };
        let sent = (0..rows).try_for_each(send);
        // SAFETY: takes no arguments, and ends the group started above.
        let ended = self.checked(op, unsafe { (functions.group_end)() });
        sent.and(ended)
    }

    fn reduce_scatter(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
        let op = "reduce_scatter";
        let each = rows_of_rank(op, x, self.ranks)? * x.rows_cols().1;
        record_reduce_scatter(exec, KERNEL, x, self.ranks);
        let (handle, gpu) = (self.handle()?, exec.gpu()?);
        gpu.library_kernel(op, x);
        let (all, stream) = (x.device(), gpu.stream().cu_stream().cast());
        let own = all + (self.rank * each * x.dtype().size()) as u64;
        // SAFETY: handle, stream and the elements of `x` are alive; with this place for its sums NCCL adds in place.
        let status = unsafe {
            let (from, to) = (all as *const c_void, own as *mut c_void);
            (self.library.functions.reduce_scatter)(from, to, each, dtype(x), SUM, handle, stream)
        };
        self.checked(op, status)
    }

    fn all_gather_rows(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
        let op = "all_gather_rows";
        let each = rows_of_rank(op, x, self.ranks)? * x.rows_cols().1;
        record_all_gather_rows(exec, KERNEL, x, self.ranks);
        let (handle, gpu) = (self.handle()?, exec.gpu()?);
        gpu.library_kernel(op, x);
        let (all, stream) = (x.device(), gpu.stream().cu_stream().cast());
        let own = all + (self.rank * each * x.dtype().size()) as u64;
        // SAFETY: handle, stream and the elements of `x` are alive; with the own part in its place NCCL gathers in
        // place.
        let status = unsafe {
            let (from, to) = (own as *const c_void, all as *mut c_void);
            (self.library.functions.all_gather)(from, to, each, dtype(x), handle, stream)
        };
        self.checked(op, status)
    }

    fn check(&self) -> Result<(), OpError> {
        let (handle, mut status) = (self.handle()?, 0);
        // SAFETY: the handle is alive; it writes one int.
        let asked = unsafe { (self.library.functions.async_error)(handle, &mut status) };
        self.checked("nccl", asked)?;
        self.checked("nccl", status)
    }

    /// Aborts on a separate thread, because the library may wait for a kernel that hangs.
    fn abort(&self) {
        let handle = self.handle.swap(std::ptr::null_mut(), Ordering::AcqRel) as usize;
        if handle == 0 {
            return;
        }
        let library = self.library.clone();
        // SAFETY: the handle is no longer shared.
        let abort = move || unsafe { (library.functions.abort)(handle as Handle) };
        if let Err(error) = std::thread::Builder::new().name("nccl-abort".into()).spawn(abort) {
            log::debug!("NCCL cannot be aborted: {error}");
        }
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let handle = *self.handle.get_mut();
        if !handle.is_null() {
            // SAFETY: the handle is alive and not used again.
            let status = unsafe { (self.library.functions.destroy)(handle) };
            if let Err(error) = self.library.check(status) {
                log::debug!("{error}");
            }
        }
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl({})", self.library.version())
    }
}
