//! Host memory for copies of device memory, page-locked in the background, and these copies.

use super::{Cuda, error};
use crate::kv::disk::{AlignedMemory, SlotMemory};
use crate::tensor::{OpError, Tensor};
use cudarc::driver::{CudaContext, CudaEvent, DriverError, result, sys};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Name in errors.
const OP: &str = "cuda: copies";
/// Size of a memory page, of which slots are multiples.
const PAGE: usize = 4096;
/// Bytes that are locked at once: other threads wait for the driver meanwhile.
const LOCKED_AT_ONCE: usize = 32 << 20;
/// Time before the first bytes are locked, so that the start of an engine does not wait for them.
const DELAY: Duration = Duration::from_secs(1);

/// Slots of host memory that the device copies to and from without the CPU. Locking takes a quarter of a second per
/// GiB, so a thread does it, in the order of the slots; the device may use a slot when it is locked.
pub struct PinnedSlots {
    context: Arc<CudaContext>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    memory: AlignedMemory,
    slot_bytes: usize,
    /// Bytes from slot to slot.
    stride: usize,
    /// Bytes that are locked at once, whole slots.
    chunk: usize,
    /// Number of bytes that are locked.
    locked: AtomicUsize,
    /// Number of bytes that the device may use: those, or all if no more can be locked.
    usable: AtomicUsize,
    stops: AtomicBool,
}

impl PinnedSlots {
    /// `slots` slots of `slot_bytes` bytes; at least one of each.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn new(gpu: &Cuda, slots: usize, slot_bytes: usize) -> Result<Self, OpError> {
        let stride = slot_bytes.next_multiple_of(PAGE);
        let chunk = stride * (LOCKED_AT_ONCE / stride).max(1);
        let memory = AlignedMemory::zeroed(slots * stride);
        let [locked, usable] = [0; 2].map(AtomicUsize::new);
        let stops = AtomicBool::new(false);
        let shared = Arc::new(Shared { memory, slot_bytes, stride, chunk, locked, usable, stops });
        let (context, own) = (gpu.context.clone(), shared.clone());
        let name = thread::Builder::new().name("pin host memory".to_owned());
        let thread = name.spawn(move || {
            thread::park_timeout(DELAY);
            if let Err(error) = own.lock(&context) {
                log::warn!("host memory for KV blocks cannot be locked, so its copies are slow: {}", error.message);
                own.usable.store(usize::MAX, Ordering::Release);
            }
        });
        let thread = thread.map_err(|e| OpError { op: OP, message: format!("no thread: {e}") })?;
        Ok(Self { context: gpu.context.clone(), shared, thread: Some(thread) })
    }

    /// True once the device may use a slot.
    pub fn is_usable(&self, slot: u32) -> bool {
        (slot as usize + 1) * self.shared.stride <= self.shared.usable.load(Ordering::Acquire)
    }

    /// The address of byte `first` of a slot, from which there are `bytes` bytes.
    fn address(&self, slot: u32, first: usize, bytes: usize) -> *mut u8 {
        let Shared { memory, slot_bytes, stride, .. } = &*self.shared;
        let start = slot as usize * stride;
        assert!(first + bytes <= *slot_bytes && start + stride <= memory.len(), "bytes outside of their slot");
        // SAFETY: within the memory, as compared above.
        unsafe { memory.start().add(start + first) }
    }

    /// The bytes of a slot, which no copy in flight may read or write.
    pub fn slot(&mut self, slot: u32) -> &mut [u8] {
        let bytes = self.shared.slot_bytes;
        let start = self.address(slot, 0, bytes);
        // SAFETY: initialised memory of `self`, which is borrowed mutably; the caller says that no copy is in flight.
        unsafe { std::slice::from_raw_parts_mut(start, bytes) }
    }

    /// Copies the first `bytes` bytes of `tensor` to a slot, from its byte `first` on, on the current stream. Nobody may
    /// read the slot before a later mark is reached.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn copy_in(&self, gpu: &Cuda, tensor: &Tensor, (slot, first, bytes): (u32, usize, usize)) -> Result<(), OpError> {
        let to = self.address(slot, first, bytes);
        debug_assert!(bytes <= tensor.bytes() as usize);
        // SAFETY: both sides have that many bytes. `drop` waits for the copy before it frees the slots; the tensor's
        // memory is freed when the device has no work left.
        let copied = unsafe {
            let to = std::slice::from_raw_parts_mut(to, bytes);
            result::memcpy_dtoh_async(to, tensor.device(), gpu.stream().cu_stream())
        };
        copied.map_err(error(OP))
    }

    /// The opposite of [`copy_in`](Self::copy_in). Nobody may write the slot before a later mark is reached.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn copy_out(
        &self,
        gpu: &Cuda,
        tensor: &mut Tensor,
        (slot, first, bytes): (u32, usize, usize),
    ) -> Result<(), OpError> {
        let from = self.address(slot, first, bytes);
        debug_assert!(bytes <= tensor.bytes() as usize);
        // SAFETY: as in `copy_in`.
        let copied = unsafe {
            let from = std::slice::from_raw_parts(from, bytes);
            result::memcpy_htod_async(tensor.device(), from, gpu.stream().cu_stream())
        };
        copied.map_err(error(OP))
    }
}

impl Drop for PinnedSlots {
    fn drop(&mut self) {
        self.shared.stops.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It does not panic.
            let _ = thread.join();
        }
        if let Err(error) = self.context.synchronize().and_then(|()| self.shared.unlock()) {
            log::debug!("host memory was not unlocked: {error}");
        }
    }
}

impl fmt::Debug for PinnedSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedSlots({} x {})", self.shared.memory.len() / self.shared.stride, self.shared.slot_bytes)
    }
}

impl Shared {
    /// Locks chunk after chunk until all is locked, or it is told to stop.
    fn lock(&self, context: &CudaContext) -> Result<(), OpError> {
        context.bind_to_thread().map_err(error(OP))?;
        for first in (0..self.memory.len()).step_by(self.chunk) {
            if self.stops.load(Ordering::Acquire) {
                return Ok(());
            }
            let bytes = self.chunk.min(self.memory.len() - first);
            // SAFETY: within the memory; `unlock` undoes it before that is freed.
            let status = unsafe { sys::cuMemHostRegister_v2(self.memory.start().add(first).cast(), bytes, 0) };
            status.result().map_err(error(OP))?;
            self.locked.store(first + bytes, Ordering::Release);
            self.usable.store(first + bytes, Ordering::Release);
        }
        Ok(())
    }

    fn unlock(&self) -> Result<(), DriverError> {
        for first in (0..self.locked.load(Ordering::Acquire)).step_by(self.chunk) {
            // SAFETY: it was locked by `lock` in chunks of this size.
            unsafe { sys::cuMemHostUnregister(self.memory.start().add(first).cast()) }.result()?;
        }
        Ok(())
    }
}

/// What streams for copies had to do at some time.
pub struct CopyMark(Vec<CudaEvent>);

impl CopyMark {
    /// True once all of that is done.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn is_reached(&self) -> Result<bool, OpError> {
        for event in &self.0 {
            if !event.try_is_complete().map_err(error(OP))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl fmt::Debug for CopyMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CopyMark")
    }
}

impl Cuda {
    /// Marks what the streams for copies `first` to `first + count` have to do now.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn mark_copies(&self, first: usize, count: usize) -> Result<CopyMark, OpError> {
        let marked = self.streams.copies().skip(first).take(count).map(|stream| {
            let event = self.context.new_event(None)?;
            event.record(stream).map(|()| event)
        });
        marked.collect::<Result<_, DriverError>>().map(CopyMark).map_err(error(OP))
    }

    /// Waits for all copies.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn finish_copies(&self) -> Result<(), OpError> {
        self.streams.copies().try_for_each(|stream| stream.synchronize()).map_err(error(OP))
    }
}
