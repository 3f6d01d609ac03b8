//! Copies between the host and the device, in the order of launches.

use super::landing::Landing;
use super::{Cuda, Image, error};
use crate::tensor::{Element, OpError};
use cudarc::driver::{DriverError, result, sys};
use std::ops::Range;

/// Bytes of the largest single copy of a step's inputs, of which two may be on their way: as much as a row of them takes in
/// the largest step that an engine may have, see `engine::options`.
pub(super) const PIECE_BYTES: usize = 1 << 20;

/// Bytes of what [`CopyKernels`] copy at once.
const WORD: usize = 4;

/// Kernels that copy rows of 4-byte words between pinned memory and the device: see [`Cuda::copy_by`].
///
/// Both take `(const uint32_t *from, uint32_t *to, uint32_t width, uint64_t from_stride, uint64_t to_stride)`: rows of
/// `width` words, which begin so many words apart. Block `(x, y)` copies `threads * words` words of row `x`, from word
/// `y * threads * words` on, and waits for its predecessors before it touches device memory.
#[derive(Debug, Clone, Copy)]
pub struct CopyKernels {
    /// Where they are.
    pub image: &'static Image,
    /// From pinned memory to the device.
    pub upload: &'static str,
    /// From the device to pinned memory.
    pub land: &'static str,
    /// Of a block.
    pub threads: usize,
    /// Words that a thread copies.
    pub words: usize,
}

/// Which way a copy goes.
#[derive(Debug, Clone, Copy)]
enum Way {
    Upload,
    Land,
}

impl Way {
    fn op(self) -> &'static str {
        match self {
            Self::Upload => "upload",
            Self::Land => "read back",
        }
    }
}

/// What a copy takes: `count` rows of `width` bytes. A side is the address of its first row, and the bytes from one row to
/// the next.
#[derive(Debug, Clone, Copy)]
struct Rows {
    count: usize,
    width: usize,
    from: (u64, usize),
    to: (u64, usize),
}

impl Rows {
    fn one(from: u64, to: u64, bytes: usize) -> Self {
        Self { count: 1, width: bytes, from: (from, bytes), to: (to, bytes) }
    }

    /// Whether they are made of aligned words.
    fn of_words(&self) -> bool {
        let Self { width, from, to, .. } = *self;
        [from.0, to.0].iter().all(|address| address.is_multiple_of(WORD as u64))
            && [width, from.1, to.1].iter().all(|bytes| bytes.is_multiple_of(WORD))
    }

    /// As the driver wants them. Addresses of the host and of devices have one space.
    fn for_engine(&self) -> sys::CUDA_MEMCPY2D {
        let Self { count, width, from, to } = *self;
        sys::CUDA_MEMCPY2D_st {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED,
            srcHost: std::ptr::null(),
            srcDevice: from.0,
            srcArray: std::ptr::null_mut(),
            srcPitch: from.1,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED,
            dstHost: std::ptr::null_mut(),
            dstDevice: to.0,
            dstArray: std::ptr::null_mut(),
            dstPitch: to.1,
            WidthInBytes: width,
            Height: count,
        }
    }
}

impl Cuda {
    /// Lets `kernels` copy from now on, where a copy engine does otherwise. The engine and the kernels around it wait for
    /// each other through memory: on an H200 a small copy sets two kernels 6 to 8 us further apart, and a megabyte 28,
    /// where a kernel takes 2 to 4 us, and 21.
    pub fn copy_by(&mut self, kernels: CopyKernels) -> Result<(), OpError> {
        self.bind()?;
        for (way, kernel) in [(Way::Upload, kernels.upload), (Way::Land, kernels.land)] {
            // Loads it now, so that what is wrong with it is known before there are steps.
            self.launch(way.op(), kernels.image, kernel)?;
        }
        self.copy_kernels = Some(kernels);
        Ok(())
    }

    /// Copies rows behind everything that was launched, without waiting.
    ///
    /// # Safety
    /// Both sides must have the rows, one in pinned memory and one on this device, until the copy is done, and nothing
    /// else may write to either until then or read what is written.
    unsafe fn copy(&mut self, way: Way, rows: &Rows) -> Result<(), OpError> {
        let Rows { count, width, from, to } = *rows;
        let Some(kernels) = self.copy_kernels.filter(|_| rows.of_words()) else {
            // SAFETY: the caller's promise.
            let status = unsafe { sys::cuMemcpy2DAsync_v2(&rows.for_engine(), self.stream.cu_stream()) };
            return status.result().map_err(error(way.op()));
        };
        let kernel = match way {
            Way::Upload => kernels.upload,
            Way::Land => kernels.land,
        };
        let words = |bytes: usize| bytes / WORD;
        // This kernel reads nothing of the device before it has waited; the one that follows may.
        let uploading = std::mem::take(&mut self.uploading) || matches!(way, Way::Upload);
        let launch = self.launch(way.op(), kernels.image, kernel)?.pointer(from.0).pointer(to.0);
        let launch = launch.u32(words(width)).u64(words(from.1) as u64).u64(words(to.1) as u64);
        let pieces = words(width).div_ceil(kernels.threads * kernels.words);
        // SAFETY: the kernel is as `CopyKernels` says; the rows are the caller's promise. Kernels address pinned memory as
        // the host does.
        unsafe { launch.overlapped().run([count, pieces, 1], kernels.threads)? };
        self.uploading = uploading;
        Ok(())
    }

    /// Copies `elements` elements to `address` in pieces: `fill(first, piece)` writes the piece that begins at element
    /// `first` to pinned memory while the piece before it travels. Pieces begin at multiples of 65,536 elements.
    ///
    /// `address` must be the start of that much room in a live [`DeviceBuffer`].
    pub(crate) fn upload<T: Element>(
        &mut self,
        address: u64,
        elements: usize,
        mut fill: impl FnMut(usize, &mut [T]),
    ) -> Result<(), OpError> {
        let piece = PIECE_BYTES / size_of::<T>();
        for first in (0..elements).step_by(piece) {
            let bytes = piece.min(elements - first) * size_of::<T>();
            let pinned = self.staging.take(&self.stream, bytes).map_err(error(Way::Upload.op()))?;
            fill(first, bytemuck::cast_slice_mut(pinned));
            let to = address + (first * size_of::<T>()) as u64;
            let rows = Rows::one(pinned.as_ptr() as u64, to, bytes);
            // SAFETY: the room is there (see above); the pinned bytes stay untouched until the copy is done, because
            // `Staging` waits before it hands them out again.
            unsafe { self.copy(Way::Upload, &rows)? };
        }
        Ok(())
    }

    /// Copies `width` elements to the front of each of `rows` rows, `stride` elements apart. `fill(row, elements)` gives
    /// those of a row, in room that holds whatever an earlier copy left there.
    ///
    /// `address` must be the start of `rows * stride` elements in a live [`DeviceBuffer`].
    pub(crate) fn upload_columns<T: Element>(
        &mut self,
        address: u64,
        (rows, width, stride): (usize, usize, usize),
        fill: impl Fn(usize, &mut [T]),
    ) -> Result<(), OpError> {
        let (width_bytes, stride_bytes) = (width * size_of::<T>(), stride * size_of::<T>());
        if width_bytes == 0 {
            return Ok(());
        }
        let at_once = (PIECE_BYTES / width_bytes).max(1);
        for first in (0..rows).step_by(at_once) {
            let count = at_once.min(rows - first);
            let pinned = self.staging.take(&self.stream, count * width_bytes).map_err(error(Way::Upload.op()))?;
            let to = bytemuck::cast_slice_mut(pinned).chunks_exact_mut(width);
            (first..).zip(to).for_each(|(row, elements)| fill(row, elements));
            let from = (pinned.as_ptr() as u64, width_bytes);
            let to = (address + (first * stride_bytes) as u64, stride_bytes);
            // SAFETY: as in `upload`; there are `count` rows of `width` elements on both sides.
            unsafe { self.copy(Way::Upload, &Rows { count, width: width_bytes, from, to })? };
        }
        Ok(())
    }

    /// Pinned memory for [`land`](Self::land).
    pub(crate) fn landing(&self, bytes: usize) -> Result<Landing, OpError> {
        self.bind()?;
        Landing::new(&self.context, bytes).map_err(error("cuda: pinned memory"))
    }

    /// Copies device memory behind everything that was launched, without waiting: `(address, place)` gives where to
    /// copy from and the range of bytes of `landing` to copy to.
    ///
    /// Each address must be the start of that many bytes in a live [`DeviceBuffer`].
    pub(crate) fn land(
        &mut self,
        landing: &mut Landing,
        copies: impl Iterator<Item = (u64, Range<usize>)>,
    ) -> Result<(), OpError> {
        for (address, place) in copies.filter(|(_, place)| !place.is_empty()) {
            let room = &mut landing.bytes_mut()[place];
            let rows = Rows::one(address, room.as_mut_ptr() as u64, room.len());
            // SAFETY: the room is there (see above); nothing reads or frees the bytes of a landing before it has waited.
            unsafe { self.copy(Way::Land, &rows)? };
        }
        landing.record(&self.stream).map_err(error(Way::Land.op()))
    }

    /// Copies from the device and waits for it, and so for all earlier work.
    pub(crate) fn download<T: Element>(&self, address: u64, out: &mut [T]) -> Result<(), DriverError> {
        // SAFETY: the caller gives an address with that much room; the wait below ends before `out` can move.
        unsafe { result::memcpy_dtoh_async(out, address, self.stream.cu_stream())? };
        self.stream.synchronize()
    }
}
