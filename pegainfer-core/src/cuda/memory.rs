//! Device and pinned host memory with ownership: freed when dropped.

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use std::fmt;
use std::sync::Arc;

/// Device memory, 256-byte aligned.
pub struct DeviceBuffer {
    context: Arc<CudaContext>,
    address: sys::CUdeviceptr,
    bytes: usize,
}

impl DeviceBuffer {
    /// Allocates and clears memory. Allocation waits for the device, so it must not be used in the step loop.
    pub fn zeroed(context: &Arc<CudaContext>, stream: &CudaStream, bytes: usize) -> Result<Self, DriverError> {
        let bytes = bytes.max(1);
        // SAFETY: the memory is cleared before it is read: only this stream uses it.
        let address = unsafe { result::malloc_sync(bytes)? };
        let buffer = Self { context: context.clone(), address, bytes };
        // SAFETY: `bytes` bytes were just allocated at `address`.
        unsafe { result::memset_d8_async(address, 0, bytes, stream.cu_stream())? };
        Ok(buffer)
    }

    /// Device address, for kernels.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: the address came from `malloc_sync` and is freed once; freeing waits for work that uses it.
        let freed = self.context.bind_to_thread().and_then(|()| unsafe { result::free_sync(self.address) });
        if let Err(error) = freed {
            log::debug!("device memory was not freed: {error}");
        }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBuffer({} bytes)", self.bytes)
    }
}

/// Page-locked host memory, from which the device can copy without the CPU.
pub(super) struct PinnedBuffer {
    context: Arc<CudaContext>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the memory is owned by the buffer alone, and any thread may access it.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates `bytes` zero bytes.
    pub fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, DriverError> {
        // SAFETY: the memory is initialised in the next step, before a reference to it exists.
        let start: *mut u8 = unsafe { result::malloc_host(bytes, 0)? }.cast();
        // SAFETY: `bytes` bytes were just allocated at `start`.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Self { context: context.clone(), start, bytes })
    }

    pub fn slice(&self) -> &[u8] {
        // SAFETY: the memory is allocated, initialised and borrowed through `self`.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    pub fn slice_mut(&mut self) -> &mut [u8] {
        // SAFETY: the memory is allocated, initialised and borrowed mutably through `self`.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // SAFETY: `start` came from `malloc_host` and is freed once.
        let freed = self.context.bind_to_thread().and_then(|()| unsafe { result::free_host(self.start.cast()) });
        if let Err(error) = freed {
            log::debug!("pinned memory was not freed: {error}");
        }
    }
}
