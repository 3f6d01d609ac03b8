//! Pinned memory for results of the device.

use super::memory::PinnedBuffer;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use std::fmt;
use std::sync::Arc;

/// Pinned memory and the event after the copies into it.
pub(crate) struct ReadbackBuffer {
    pinned: PinnedBuffer,
    done: CudaEvent,
}

impl ReadbackBuffer {
    pub(super) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, DriverError> {
        Ok(Self { pinned: PinnedBuffer::new(context, bytes.max(1))?, done: context.new_event(None)? })
    }

    /// The bytes, for copies before [`record`](Self::record).
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        self.pinned.slice_mut()
    }

    /// Marks the end of the copies.
    pub(super) fn record(&mut self, stream: &CudaStream) -> Result<(), DriverError> {
        self.done.record(stream)
    }

    /// Waits for the copies, not for later launches, and returns the bytes.
    pub fn wait(&self) -> Result<&[u8], DriverError> {
        self.done.synchronize()?;
        Ok(self.pinned.slice())
    }
}

impl Drop for ReadbackBuffer {
    fn drop(&mut self) {
        // A copy in flight must not write to freed memory.
        if let Err(error) = self.done.synchronize() {
            log::debug!("a copy from the device failed: {error}");
        }
    }
}

impl fmt::Debug for ReadbackBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReadbackBuffer({} bytes)", self.pinned.slice().len())
    }
}
