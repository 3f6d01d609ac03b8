//! Pinned memory through which everything from the host to the device passes.

use super::memory::PinnedBuffer;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, sys};
use std::sync::Arc;

/// The largest single piece: large enough to keep the link busy, small enough that filling and copying overlap.
pub(super) const PIECE_BYTES: usize = 16 << 20;
/// Pieces begin at a cache line.
const ALIGN: usize = 64;

/// Two halves: one is filled while copies from the other are in flight. A half is handed out again only when the copies
/// that were made from it are done.
pub(super) struct Staging {
    pinned: PinnedBuffer,
    /// For each half: after its last copy.
    done: [CudaEvent; 2],
    half: usize,
    used: usize,
}

impl Staging {
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        let done = [context.new_event(None)?, context.new_event(None)?];
        Ok(Self { pinned: PinnedBuffer::new(context, 2 * PIECE_BYTES)?, done, half: 0, used: 0 })
    }

    /// `bytes` bytes, at most [`PIECE_BYTES`], to be filled and copied on `stream` before the next call.
    pub fn take(&mut self, stream: &CudaStream, bytes: usize) -> Result<&mut [u8], DriverError> {
        assert!(bytes <= PIECE_BYTES, "{bytes} bytes do not fit a piece of the staging memory");
        if self.used + bytes > PIECE_BYTES {
            self.done[self.half].record(stream)?;
            self.half ^= 1;
            self.used = 0;
            self.done[self.half].synchronize()?;
        }
        let first = self.half * PIECE_BYTES + self.used;
        self.used += bytes.next_multiple_of(ALIGN);
        Ok(&mut self.pinned.slice_mut()[first..][..bytes])
    }
}

/// A copy of packed host rows of `width` bytes to device rows that are `stride` bytes apart.
pub(super) fn columns(from: &[u8], to: sys::CUdeviceptr, width: usize, stride: usize) -> sys::CUDA_MEMCPY2D {
    sys::CUDA_MEMCPY2D_st {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: from.as_ptr().cast(),
        srcDevice: 0,
        srcArray: std::ptr::null_mut(),
        srcPitch: width,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: std::ptr::null_mut(),
        dstDevice: to,
        dstArray: std::ptr::null_mut(),
        dstPitch: stride,
        WidthInBytes: width,
        Height: from.len() / width,
    }
}
