//! Copies between the host and the device, in the order of launches.

use super::landing::Landing;
use super::{Cuda, error, staging};
use crate::tensor::{Element, OpError};
use cudarc::driver::{DriverError, result};
use std::ops::Range;

/// Bytes of the largest single copy of a step's inputs, of which two may be on their way: as much as a row of them takes in
/// the largest step that an engine may have, see `engine::options`.
pub(super) const PIECE_BYTES: usize = 1 << 20;

impl Cuda {
    /// Copies `elements` elements to `address` in pieces: `fill(first, piece)` writes the piece that begins at element
    /// `first` to pinned memory while the piece before it travels. Pieces begin at multiples of 65,536 elements.
    ///
    /// `address` must be the start of that much room in a live [`DeviceBuffer`].
    pub(crate) fn upload<T: Element>(
        &mut self,
        address: u64,
        elements: usize,
        mut fill: impl FnMut(usize, &mut [T]),
    ) -> Result<(), DriverError> {
        let piece = PIECE_BYTES / size_of::<T>();
        for first in (0..elements).step_by(piece) {
            let bytes = piece.min(elements - first) * size_of::<T>();
            let pinned = self.staging.take(&self.stream, bytes)?;
            fill(first, bytemuck::cast_slice_mut(pinned));
            let to = address + (first * size_of::<T>()) as u64;
            // SAFETY: the room is there (see above); the pinned bytes stay untouched until the copy is done, because
            // `Staging` waits before it hands them out again.
            unsafe { result::memcpy_htod_async(to, pinned, self.stream.cu_stream())? };
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
    ) -> Result<(), DriverError> {
        let (width_bytes, stride_bytes) = (width * size_of::<T>(), stride * size_of::<T>());
        if width_bytes == 0 {
            return Ok(());
        }
        let at_once = (PIECE_BYTES / width_bytes).max(1);
        for first in (0..rows).step_by(at_once) {
            let rows = at_once.min(rows - first);
            let pinned = self.staging.take(&self.stream, rows * width_bytes)?;
            let to = bytemuck::cast_slice_mut(pinned).chunks_exact_mut(width);
            (first..).zip(to).for_each(|(row, elements)| fill(row, elements));
            let copy = staging::columns(pinned, address + (first * stride_bytes) as u64, width_bytes, stride_bytes);
            // SAFETY: as in `upload`; `copy` names `rows` rows of `width` elements on both sides.
            unsafe { cudarc::driver::sys::cuMemcpy2DAsync_v2(&copy, self.stream.cu_stream()) }.result()?;
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
        &self,
        landing: &mut Landing,
        copies: impl Iterator<Item = (u64, Range<usize>)>,
    ) -> Result<(), DriverError> {
        for (address, place) in copies.filter(|(_, place)| !place.is_empty()) {
            // SAFETY: the room is there (see above); nothing reads or frees the bytes of a landing before it has waited.
            unsafe { result::memcpy_dtoh_async(&mut landing.bytes_mut()[place], address, self.stream.cu_stream())? };
        }
        landing.record(&self.stream)
    }

    /// Copies from the device and waits for it, and so for all earlier work.
    pub(crate) fn download<T: Element>(&self, address: u64, out: &mut [T]) -> Result<(), DriverError> {
        // SAFETY: the caller gives an address with that much room; the wait below ends before `out` can move.
        unsafe { result::memcpy_dtoh_async(out, address, self.stream.cu_stream())? };
        self.stream.synchronize()
    }
}
