//! Results on their way from the device to the host, while later steps run.

use crate::cuda::{self, ReadbackBuffer};
use crate::exec::{Device, Exec};
use crate::scratch::Scratch;
use crate::tensor::{Element, OpError, Tensor};
use std::ops::Range;

/// Parts begin at a cache line, aligned for every element type.
const ALIGN: usize = 64;

/// Host memory for results of a step. Reused from step to step: nothing is allocated after [`Readback::new`].
#[derive(Debug)]
pub struct Readback {
    memory: Memory,
    capacity: usize,
    /// Bytes of each tensor of the last [`start`](Self::start).
    parts: Vec<Range<usize>>,
}

#[derive(Debug)]
enum Memory {
    /// Pinned memory; the GPU writes to it after its kernels.
    Gpu(ReadbackBuffer),
    /// Host memory; on the CPU, results are computed before the copy starts.
    Host(Scratch),
}

/// The tensors of a [`Readback`], arrived.
#[derive(Debug)]
pub struct Arrived<'a> {
    bytes: &'a [u8],
    parts: &'a [Range<usize>],
}

impl Readback {
    /// A readback for tensors whose sizes, rounded up to 64 bytes each, add up to at most `capacity` bytes.
    pub fn new(exec: &mut Exec, capacity: usize) -> std::io::Result<Self> {
        let memory = match exec.device() {
            Device::Cuda => {
                let buffer = exec.gpu().and_then(|gpu| gpu.readback_buffer(capacity)).map_err(std::io::Error::other)?;
                Memory::Gpu(buffer)
            }
            Device::Cpu(_) | Device::Meta => Memory::Host(Scratch::new()),
        };
        Ok(Self { memory, capacity, parts: Vec::new() })
    }

    /// Copies the tensors as earlier ops leave them; later ops may overwrite them. Does not wait. On `Meta` the parts
    /// are empty.
    pub fn start(&mut self, exec: &mut Exec, tensors: &[&Tensor]) -> Result<(), OpError> {
        self.parts.clear();
        let mut end = 0;
        for tensor in tensors {
            let bytes = if exec.device() == Device::Meta { 0 } else { tensor.bytes() as usize };
            self.parts.push(end..end + bytes);
            end = (end + bytes).next_multiple_of(ALIGN);
        }
        assert!(end <= self.capacity, "{end} bytes do not fit a read-back of {}", self.capacity);
        match &mut self.memory {
            Memory::Gpu(buffer) => {
                let copies = tensors.iter().map(|tensor| tensor.device()).zip(self.parts.iter().cloned());
                exec.gpu()?.read_back(buffer, copies)
            }
            Memory::Host(memory) => {
                let bytes = memory.slice::<u8>(end);
                let copies = tensors.iter().zip(&self.parts).filter(|(_, part)| !part.is_empty());
                copies.for_each(|(tensor, part)| bytes[part.clone()].copy_from_slice(tensor.host_bytes()));
                Ok(())
            }
        }
    }

    /// Waits for the copies of the last [`start`](Self::start), not for later launches.
    pub fn wait(&mut self) -> Result<Arrived<'_>, OpError> {
        let bytes = match &mut self.memory {
            Memory::Gpu(buffer) => buffer.wait().map_err(cuda::error("read back"))?,
            Memory::Host(memory) => memory.slice(self.parts.last().map_or(0, |part| part.end)),
        };
        Ok(Arrived { bytes, parts: &self.parts })
    }
}

impl Arrived<'_> {
    /// The elements of tensor `i` of the list passed to [`Readback::start`]; `T` must be its element type.
    pub fn tensor<T: Element>(&self, i: usize) -> &[T] {
        bytemuck::cast_slice(&self.bytes[self.parts[i].clone()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::tensor::DType;

    #[test]
    fn later_writes_are_not_seen_and_ranges_are_kept() {
        let mut exec = Exec::cpu(Isa::best(), Some(1)).unwrap();
        let mut ids = exec.tensor("ids", &[6], DType::U32).unwrap();
        exec.fill_rows(&mut ids, &[0u32, 1, 2, 3, 4, 5]).unwrap();
        let mut matrix = exec.tensor("matrix", &[3, 2], DType::F32).unwrap();
        exec.fill_rows(&mut matrix, &[0f32, 1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        ids.set_range(2, 3);
        matrix.set_range(1, 1);
        let mut readback = Readback::new(&mut exec, 128).unwrap();
        readback.start(&mut exec, &[&ids, &matrix]).unwrap();
        ids.set_rows(6);
        exec.fill_rows(&mut ids, &[9u32; 6]).unwrap();
        let arrived = readback.wait().unwrap();
        assert_eq!((arrived.tensor::<u32>(0), arrived.tensor::<f32>(1)), (&[2, 3, 4][..], &[2.0, 3.0][..]));
    }

    #[test]
    fn nothing_comes_from_meta() {
        let mut exec = Exec::meta().unwrap();
        let ids = exec.tensor("ids", &[6], DType::U32).unwrap();
        let mut readback = Readback::new(&mut exec, 64).unwrap();
        readback.start(&mut exec, &[&ids]).unwrap();
        assert!(readback.wait().unwrap().tensor::<u32>(0).is_empty());
    }

    #[test]
    fn adjacent_tensors_are_filled_together() {
        let mut exec = Exec::cpu(Isa::best(), Some(1)).unwrap();
        let [mut a, mut b] = exec.adjacent([("a", &[3]), ("b", &[5, 2])], DType::U32).unwrap();
        exec.fill_adjacent([&mut a, &mut b], [&[1u32, 2, 3], &[4, 5]]).unwrap();
        assert_eq!((a.host::<u32>(), b.host::<u32>()), (&[1, 2, 3][..], &[4, 5][..]));
        assert_eq!((a.shape(), b.shape()), (&[3][..], &[1, 2][..]));
        assert_ne!(a.id(), b.id());
    }
}
