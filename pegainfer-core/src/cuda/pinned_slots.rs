//! Host memory for copies of device memory, page-locked in the background, and these copies.

use super::{Cuda, error};
use crate::tensor::{OpError, Tensor};
use cudarc::driver::{CudaContext, CudaEvent, DriverError, result, sys};
use memmap2::{MmapOptions, MmapRaw};
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

/// Bytes of a tensor and of slots.
#[derive(Debug, Clone, Copy)]
pub struct SlotBytes {
    /// First byte in the tensor.
    pub at: usize,
    /// The slot, or the first one of a [`run`](PinnedSlots::run), whose slots are copied whole.
    pub slot: u32,
    /// First byte in the slot.
    pub first: usize,
    /// Number of bytes.
    pub bytes: usize,
}

struct Shared {
    memory: MmapRaw,
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
    /// There is no address space, or no thread.
    pub fn new(gpu: &Cuda, slots: usize, slot_bytes: usize) -> Result<Self, OpError> {
        let stride = slot_bytes.next_multiple_of(PAGE);
        let chunk = stride * (LOCKED_AT_ONCE / stride).max(1);
        let no_memory = |e: std::io::Error| OpError { op: OP, message: format!("no memory: {e}") };
        // Pages take memory when they are locked, or written first.
        let memory = MmapRaw::from(MmapOptions::new().len(slots * stride).map_anon().map_err(no_memory)?);
        let [locked, usable] = [0; 2].map(AtomicUsize::new);
        let stops = AtomicBool::new(false);
        let shared = Arc::new(Shared { memory, slot_bytes, stride, chunk, locked, usable, stops });
        gpu.bind()?;
        // A few blocks at once, so that the first prompts are copied, too.
        shared.lock_chunk(0)?;
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

    /// The address of byte `first` of a slot; there are `bytes` bytes, also of the slots that follow.
    fn address(&self, slot: u32, first: usize, bytes: usize) -> *mut u8 {
        let Shared { memory, stride, .. } = &*self.shared;
        let start = slot as usize * stride + first;
        assert!(start + bytes <= memory.len(), "bytes outside of the slots");
        // SAFETY: within the memory, as compared above.
        unsafe { memory.as_mut_ptr().add(start) }
    }

    /// The bytes of a slot, which no copy in flight may read or write.
    pub fn slot(&mut self, slot: u32) -> &mut [u8] {
        let bytes = self.shared.slot_bytes;
        let start = self.address(slot, 0, bytes);
        // SAFETY: initialised memory of `self`, which is borrowed mutably; the caller says that no copy is in flight.
        unsafe { std::slice::from_raw_parts_mut(start, bytes) }
    }

    /// True if a slot has this number of bytes, and the next one follows without a gap.
    pub fn is_whole(&self, bytes: usize) -> bool {
        bytes == self.shared.slot_bytes && bytes == self.shared.stride
    }

    /// Number of the first of `slots` that follow each other in one segment of locked memory.
    pub fn run(&self, slots: impl IntoIterator<Item = u32>) -> usize {
        let Shared { stride, chunk, .. } = &*self.shared;
        let mut slots = slots.into_iter();
        let Some(first) = slots.next() else { return 0 };
        let of_chunk = |slot: u32| slot as usize * stride / chunk;
        let follows = |(slot, after): &(u32, u32)| slot == after && of_chunk(*slot) == of_chunk(first);
        1 + slots.zip(first + 1..).take_while(follows).count()
    }

    /// Copies between `tensor`, from byte `place.at` on, and slots, on the current stream, in the given direction. Until
    /// a later mark is reached, nobody may read or write what is written, or write what is read.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn copy(&self, gpu: &Cuda, tensor: &mut Tensor, place: SlotBytes, to_slots: bool) -> Result<(), OpError> {
        let SlotBytes { at, slot, first, bytes } = place;
        let host = self.address(slot, first, bytes);
        assert!(at + bytes <= tensor.bytes() as usize, "bytes outside of the tensor");
        let (device, stream) = (tensor.device() + at as u64, gpu.stream().cu_stream());
        // SAFETY: both sides have that many bytes. `drop` waits for the copy before it frees the slots; the tensor's
        // memory is freed when the device has no work left.
        let copied = unsafe {
            if to_slots {
                result::memcpy_dtoh_async(std::slice::from_raw_parts_mut(host, bytes), device, stream)
            } else {
                result::memcpy_htod_async(device, std::slice::from_raw_parts(host, bytes), stream)
            }
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
        for first in (self.chunk..self.memory.len()).step_by(self.chunk) {
            if self.stops.load(Ordering::Acquire) {
                return Ok(());
            }
            self.lock_chunk(first)?;
        }
        Ok(())
    }

    /// Locks the chunk that begins at byte `first`; those before it are locked. The context is bound.
    fn lock_chunk(&self, first: usize) -> Result<(), OpError> {
        let bytes = self.chunk.min(self.memory.len() - first);
        // SAFETY: within the memory; `unlock` undoes it before that is freed.
        let status = unsafe { sys::cuMemHostRegister_v2(self.memory.as_mut_ptr().add(first).cast(), bytes, 0) };
        status.result().map_err(error(OP))?;
        self.locked.store(first + bytes, Ordering::Release);
        self.usable.store(first + bytes, Ordering::Release);
        Ok(())
    }

    fn unlock(&self) -> Result<(), DriverError> {
        for first in (0..self.locked.load(Ordering::Acquire)).step_by(self.chunk) {
            // SAFETY: it was locked by `lock` in chunks of this size.
            unsafe { sys::cuMemHostUnregister(self.memory.as_mut_ptr().add(first).cast()) }.result()?;
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

    /// The time from the first of the streams that reached `earlier` to the last that reached this mark, which is done.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn since(&self, earlier: &Self) -> Result<Duration, OpError> {
        let mut longest = 0f32;
        for (begin, end) in earlier.0.iter().flat_map(|begin| self.0.iter().map(move |end| (begin, end))) {
            longest = longest.max(begin.elapsed_ms(end).map_err(error(OP))?);
        }
        Ok(Duration::from_secs_f64(f64::from(longest) / 1e3))
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
            let event = self.context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT))?;
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
