//! Copies between host and device, in launch order.
//!
//! The copies are asynchronous, on the stream of the kernels. A kernel launched after a copy with programmatic
//! dependent launch starts when the copy is complete, because only kernels can release their successor early. Whatever
//! a step's first kernel reads before it waits for its predecessor has therefore arrived, and so have the inputs of
//! later kernels.

use super::readback_buffer::ReadbackBuffer;
use super::staging::STAGING_BYTES;
use super::{Cuda, error};
use crate::tensor::{Element, OpError};
use cudarc::driver::{DriverError, result, sys};
use std::ops::Range;

/// Names of the two directions in errors.
const UPLOAD: &str = "upload";
const READ_BACK: &str = "read back";

/// `count` rows of `width` bytes each. A side is the address of its first row, and the bytes from one row to the next.
#[derive(Debug, Clone, Copy)]
struct Rows {
    count: usize,
    width: usize,
    from: (u64, usize),
    to: (u64, usize),
}

impl Rows {
    /// Descriptor for the driver. Host and device addresses share one address space.
    fn descriptor(&self) -> sys::CUDA_MEMCPY2D {
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
    /// Copies `elements` elements to `address` in chunks. `fill(first, chunk)` writes the chunk from element `first` on
    /// to pinned memory while the previous chunk is copied. Chunks start at multiples of 65,536 elements.
    ///
    /// `address` must be the start of a live [`DeviceBuffer`](super::DeviceBuffer) with enough memory.
    pub(crate) fn upload<T: Element>(
        &mut self,
        address: u64,
        elements: usize,
        mut fill: impl FnMut(usize, &mut [T]),
    ) -> Result<(), OpError> {
        let chunk = STAGING_BYTES / size_of::<T>();
        for first in (0..elements).step_by(chunk) {
            let bytes = chunk.min(elements - first) * size_of::<T>();
            let pinned = self.staging.take(&self.streams.main.stream, bytes).map_err(error(UPLOAD))?;
            fill(first, bytemuck::cast_slice_mut(pinned));
            let to = address + (first * size_of::<T>()) as u64;
            // SAFETY: the destination has that much space (see above); the pinned bytes stay untouched until the copy
            // is done, because `Staging` waits before it hands them out again.
            unsafe { result::memcpy_htod_async(to, pinned, self.streams.main.stream.cu_stream()) }
                .map_err(error(UPLOAD))?;
        }
        self.completes_pending();
        Ok(())
    }

    /// Copies `width` elements to the start of each of `rows` rows, `stride` elements apart. `fill(row, elements)`
    /// writes a row's elements into memory with undefined contents.
    ///
    /// `address` must be the start of `rows * stride` elements in a live [`DeviceBuffer`](super::DeviceBuffer).
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
        let at_once = (STAGING_BYTES / width_bytes).max(1);
        for first in (0..rows).step_by(at_once) {
            let count = at_once.min(rows - first);
            let pinned = self.staging.take(&self.streams.main.stream, count * width_bytes).map_err(error(UPLOAD))?;
            let to = bytemuck::cast_slice_mut(pinned).chunks_exact_mut(width);
            (first..).zip(to).for_each(|(row, elements)| fill(row, elements));
            let from = (pinned.as_ptr() as u64, width_bytes);
            let to = (address + (first * stride_bytes) as u64, stride_bytes);
            let rows = Rows { count, width: width_bytes, from, to };
            // SAFETY: see `upload`; there are `count` rows of `width` elements on both sides.
            let status = unsafe { sys::cuMemcpy2DAsync_v2(&rows.descriptor(), self.streams.main.stream.cu_stream()) };
            status.result().map_err(error(UPLOAD))?;
        }
        self.completes_pending();
        Ok(())
    }

    /// Pinned memory for [`read_back`](Self::read_back).
    pub(crate) fn readback_buffer(&self, bytes: usize) -> Result<ReadbackBuffer, OpError> {
        self.bind()?;
        ReadbackBuffer::new(&self.context, bytes).map_err(error("cuda: pinned memory"))
    }

    /// Copies device memory after everything launched so far, without waiting. Each `(address, place)` is a source and
    /// the range of bytes of `buffer` to copy to.
    ///
    /// Each address must be the start of that many bytes in a live [`DeviceBuffer`](super::DeviceBuffer).
    pub(crate) fn read_back(
        &mut self,
        buffer: &mut ReadbackBuffer,
        copies: impl Iterator<Item = (u64, Range<usize>)>,
    ) -> Result<(), OpError> {
        for (address, place) in copies.filter(|(_, place)| !place.is_empty()) {
            let to = &mut buffer.bytes_mut()[place];
            // SAFETY: the address has that many bytes (see above); nothing reads or frees the bytes of a readback
            // buffer before it has waited.
            unsafe { result::memcpy_dtoh_async(to, address, self.streams.main.stream.cu_stream()) }
                .map_err(error(READ_BACK))?;
        }
        self.completes_pending();
        buffer.record(&self.streams.main.stream).map_err(error(READ_BACK))
    }

    /// Copies from the device and waits for the copy and all earlier work.
    pub(crate) fn download<T: Element>(&self, address: u64, out: &mut [T]) -> Result<(), DriverError> {
        // SAFETY: the caller guarantees an address with enough memory; the wait below ends before `out` can move.
        unsafe { result::memcpy_dtoh_async(out, address, self.streams.main.stream.cu_stream())? };
        self.streams.main.stream.synchronize()
    }
}

#[cfg(test)]
mod tests {
    use crate::exec::Exec;
    use crate::readback::Readback;
    use crate::rng;
    use crate::tensor::{DType, Tensor};
    use half::bf16;

    fn words(n: usize, seed: u64) -> Vec<u32> {
        (0..n as u64).map(|i| rng::bits(seed, i) as u32).collect()
    }

    /// All words of a tensor.
    fn contents(exec: &Exec, tensor: &mut Tensor) -> Vec<u32> {
        tensor.set_rows(tensor.max_rows());
        let mut words = vec![0; tensor.elements()];
        exec.read(tensor, 0, &mut words).unwrap();
        words
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn every_shape_arrives_and_nothing_else_is_written() {
        let mut exec = Exec::cuda(0, Some(2)).unwrap();
        let shapes: [(&str, &[usize]); 3] = [("a", &[200_000]), ("b", &[200_000]), ("c", &[200_000])];
        let mut tensors = exec.adjacent(shapes, DType::U32).unwrap();
        let mut expected = [(); 3].map(|()| vec![0; 200_000]);
        // The last ones take several staging buffers.
        for (i, width) in [1, 7, 8, 257, 90_001, 200_000].into_iter().enumerate() {
            let values = [0, 1, 2].map(|row| words(width, (3 * i + row) as u64));
            let [a, b, c] = &mut tensors;
            exec.fill_adjacent([a, b, c], [0, 1, 2].map(|row| &values[row][..])).unwrap();
            for ((tensor, expected), values) in tensors.iter_mut().zip(&mut expected).zip(&values) {
                expected[..width].copy_from_slice(values);
                assert!(contents(&exec, tensor) == *expected, "{width} words of {}", tensor.name());
            }
        }
        let mut halves = exec.tensor("halves", &[5], DType::Bf16).unwrap();
        let values = [1.0, 2.0, 3.0].map(bf16::from_f32);
        exec.fill_rows(&mut halves, &values).unwrap();
        let mut read = [bf16::ZERO; 3];
        exec.read(&halves, 0, &mut read).unwrap();
        assert_eq!(read, values, "not a multiple of 4 bytes");
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn steps_in_flight_keep_their_inputs_and_their_results() {
        let mut exec = Exec::cuda(0, Some(2)).unwrap();
        let shapes: [(&str, &[usize]); 2] = [("a", &[70_000]), ("b", &[5_000, 8])];
        let [mut a, mut b] = exec.adjacent(shapes, DType::U32).unwrap();
        let mut readbacks = [0, 1].map(|_| Readback::new(&mut exec, 500_000).unwrap());
        let step = |i: usize| (words(1 + i * 9973 % 70_000, i as u64), words(8 * (1 + i * 37 % 5_000), !i as u64));
        for i in 0..60 {
            let (first, second) = step(i);
            exec.fill_adjacent([&mut a, &mut b], [&first, &second]).unwrap();
            readbacks[i % 2].start(&mut exec, &[&a, &b]).unwrap();
            if let Some(before) = i.checked_sub(1) {
                let arrived = readbacks[before % 2].wait().unwrap();
                let (first, second) = step(before);
                assert!(arrived.tensor::<u32>(0) == first && arrived.tensor::<u32>(1) == second, "step {before}");
            }
        }
    }
}
