//! The tensors of an [`Exec`]: allocation, filling and reading.

use super::{Device, Exec};
use crate::cuda::{self, DeviceBuffer, Target};
use crate::tensor::{DType, Element, OpError, Storage, Tensor};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Name, shape and element type of a tensor of [`Exec::aliased`].
pub type AliasedTensor<'a> = (&'a str, [usize; 2], DType);

/// Alignment of tensors that share a buffer, in bytes.
const ALIGNMENT: usize = 256;

/// Bytes of a tensor within a shared buffer.
fn tensor_bytes((_, shape, dtype): &AliasedTensor<'_>) -> usize {
    (shape[0] * shape[1] * dtype.size()).next_multiple_of(ALIGNMENT)
}

/// Bytes that [`Exec::aliased`] allocates on a GPU.
fn aliased_bytes(groups: &[&[AliasedTensor<'_>]]) -> usize {
    groups.iter().map(|group| group.iter().map(tensor_bytes).sum()).max().unwrap_or(0)
}

impl Exec {
    /// A zero-filled tensor on this device.
    pub fn tensor(&mut self, name: &str, shape: &[usize], dtype: DType) -> io::Result<Tensor> {
        let id = self.next_tensor;
        self.next_tensor += 1;
        let bytes = shape.iter().product::<usize>() * dtype.size();
        self.allocated += bytes as u64;
        let storage = match (&self.cuda, self.device) {
            (Some(cuda), _) => Storage::Device(Arc::new(cuda.zeroed(bytes).map_err(io::Error::other)?), 0),
            (None, Device::Meta) => Storage::Meta,
            (None, _) => Storage::host(bytes)?,
        };
        Ok(Tensor::new(name, id, shape, dtype, storage))
    }

    /// Zero-filled tensors with buffer aliasing: the lifetimes of two groups must not overlap. On a GPU all groups
    /// share one buffer, as large as the largest group; on other devices each tensor has its own storage. Writing to a
    /// group invalidates the values of the others. Returns the tensors of all groups, in the given order. `Meta` counts
    /// what a GPU allocates.
    pub fn aliased(&mut self, groups: &[&[AliasedTensor<'_>]]) -> io::Result<Vec<Tensor>> {
        let (bytes, before) = (aliased_bytes(groups), self.allocated);
        let shared = self.shared(bytes)?;
        let mut tensors = Vec::new();
        for group in groups {
            let mut offset = 0;
            for tensor @ (name, shape, dtype) in *group {
                tensors.push(self.tensor_in(shared.as_ref(), offset, name, shape, *dtype)?);
                offset += tensor_bytes(tensor);
            }
        }
        if self.device == Device::Meta {
            self.allocated = before + bytes as u64;
        }
        Ok(tensors)
    }

    /// Zero-filled tensors of these names and shapes. On a GPU they lie at equal distances in one buffer, so that one
    /// copy can fill all of them; see [`fill_adjacent`](Self::fill_adjacent).
    pub fn adjacent<const N: usize>(
        &mut self,
        tensors: [(&str, &[usize]); N],
        dtype: DType,
    ) -> io::Result<[Tensor; N]> {
        let elements = tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).max().unwrap_or(0);
        let distance = (elements * dtype.size()).next_multiple_of(ALIGNMENT);
        let shared = self.shared(N * distance)?;
        let tensor = |(i, (name, shape)): (usize, (&str, &[usize]))| {
            self.tensor_in(shared.as_ref(), i * distance, name, shape, dtype)
        };
        let tensors: Vec<Tensor> = tensors.into_iter().enumerate().map(tensor).collect::<io::Result<_>>()?;
        tensors.try_into().map_err(|_| io::Error::other("one tensor for each name"))
    }

    /// A zero-filled buffer for several tensors; `None` on devices where each tensor has its own storage.
    fn shared(&self, bytes: usize) -> io::Result<Option<Arc<DeviceBuffer>>> {
        let buffer = self.cuda.as_ref().map(|cuda| cuda.zeroed(bytes).map(Arc::new).map_err(io::Error::other));
        buffer.transpose()
    }

    /// A tensor at byte `offset` of `shared`, or with its own storage.
    fn tensor_in(
        &mut self,
        shared: Option<&Arc<DeviceBuffer>>,
        offset: usize,
        name: &str,
        shape: &[usize],
        dtype: DType,
    ) -> io::Result<Tensor> {
        let Some(buffer) = shared else { return self.tensor(name, shape, dtype) };
        self.next_tensor += 1;
        Ok(Tensor::new(name, self.next_tensor - 1, shape, dtype, Storage::Device(buffer.clone(), offset)))
    }

    /// Writes `range` of the elements of `tensor`. `fill(first, chunk)` computes the elements from `first` of the range
    /// on, on the host threads. For a GPU, chunks start at multiples of 65,536 elements; otherwise there is one chunk.
    /// No effect on `Meta`.
    pub fn write<T: Element>(
        &mut self,
        tensor: &mut Tensor,
        range: Range<usize>,
        fill: impl Fn(usize, &mut [T]) + Sync,
    ) -> Result<(), OpError> {
        assert!(tensor.dtype() == T::DTYPE && range.end <= tensor.elements(), "{}", tensor.name());
        let pool = self.pool.clone();
        let fill = |first: usize, chunk: &mut [T]| pool.install(|| fill(first, chunk));
        match (&mut self.cuda, self.device) {
            (Some(cuda), _) => {
                cuda.bind()?;
                let address = tensor.device() + (range.start * size_of::<T>()) as u64;
                cuda.upload(address, range.len(), fill)?;
            }
            (None, Device::Meta) => {}
            (None, _) => fill(0, &mut tensor.host_mut()[range]),
        }
        Ok(())
    }

    /// Fills `targets` on the GPU and waits for the copies. `fill(i, first, bytes)` writes the bytes of target `i` from
    /// byte `first` on, in chunks in any order, on the host threads. No effect without targets.
    pub(crate) fn upload<E: From<OpError> + Send>(
        &mut self,
        targets: &[Target],
        fill: impl Fn(usize, usize, &mut [u8]) -> Result<(), E> + Send + Sync,
    ) -> Result<(), E> {
        if targets.is_empty() {
            return Ok(());
        }
        let pool = self.pool.clone();
        let gpu = self.gpu()?;
        pool.install(|| gpu.upload_all(targets, fill))
    }

    /// Sets every element to 0. Asynchronous on a GPU, and part of a captured graph.
    pub fn clear(&mut self, tensor: &mut Tensor) -> Result<(), OpError> {
        match (&mut self.cuda, self.device) {
            (Some(cuda), _) => cuda.clear(tensor),
            (None, Device::Meta) => Ok(()),
            (None, _) => {
                match tensor.dtype() {
                    DType::Bf16 => tensor.host_mut::<half::bf16>().fill(half::bf16::ZERO),
                    DType::F32 => tensor.host_mut::<f32>().fill(0.0),
                    DType::U32 => tensor.host_mut::<u32>().fill(0),
                    DType::U8 => tensor.host_mut::<u8>().fill(0),
                    DType::E4m3 => tensor.host_storage_mut().fill(0),
                }
                Ok(())
            }
        }
    }

    /// Copies `values` into the tensor and sets its leading dimension accordingly; the other dimensions are unchanged.
    /// On a GPU the copy is asynchronous, but `values` may be reused immediately.
    pub fn fill_rows<T: Element>(&mut self, tensor: &mut Tensor, values: &[T]) -> Result<(), OpError> {
        let cols = tensor.rows_cols().1;
        tensor.set_rows(values.len() / cols.max(1));
        self.write_packed(tensor, values)
    }

    /// Like [`fill_rows`](Self::fill_rows), for all (at least two) tensors of one [`adjacent`](Self::adjacent) call, in
    /// its order. On a GPU this is one copy; elements after the values of a tensor are undefined afterwards.
    pub fn fill_adjacent<const N: usize, T: Element>(
        &mut self,
        mut tensors: [&mut Tensor; N],
        values: [&[T]; N],
    ) -> Result<(), OpError> {
        let Some(cuda) = &mut self.cuda else {
            let mut pairs = tensors.into_iter().zip(values);
            return pairs.try_for_each(|(tensor, values)| self.fill_rows(tensor, values));
        };
        for (tensor, values) in tensors.iter_mut().zip(values) {
            tensor.set_rows(values.len() / tensor.rows_cols().1.max(1));
        }
        let width = values.iter().map(|values| values.len()).max().unwrap_or(0);
        let tensors = tensors.map(|tensor| &*tensor);
        let (first, second) = (tensors[0].device(), tensors[1].device());
        for (i, tensor) in tensors.into_iter().enumerate() {
            let in_place = tensor.device() == first + i as u64 * (second - first);
            assert!(in_place && tensor.dtype() == T::DTYPE, "{} is not adjacent", tensor.name());
        }
        let fill = |row: usize, to: &mut [T]| to[..values[row].len()].copy_from_slice(values[row]);
        let stride = (second - first) as usize / size_of::<T>();
        cuda.upload_columns(first, (N, width, stride), fill)
    }

    fn write_packed<T: Element>(&mut self, tensor: &mut Tensor, values: &[T]) -> Result<(), OpError> {
        assert_eq!(tensor.dtype(), T::DTYPE, "{}", tensor.name());
        match (&mut self.cuda, self.device) {
            (Some(cuda), _) => {
                let copy = |first: usize, chunk: &mut [T]| chunk.copy_from_slice(&values[first..][..chunk.len()]);
                cuda.upload(tensor.device(), values.len(), copy)
            }
            (None, Device::Meta) => Ok(()),
            (None, _) => {
                tensor.host_mut::<T>().copy_from_slice(values);
                Ok(())
            }
        }
    }

    /// Copies the first bytes of the memory of `tensor`, of any type, to `out`; waits for a GPU. On `Meta`, `out` is
    /// unchanged.
    pub fn read_bytes(&self, tensor: &Tensor, out: &mut [u8]) -> Result<(), OpError> {
        assert!(out.len() <= tensor.capacity(), "{}", tensor.name());
        match (&self.cuda, self.device) {
            (Some(cuda), _) => cuda.download(tensor.device(), out).map_err(cuda::error("read")),
            (None, Device::Meta) => Ok(()),
            (None, _) => {
                out.copy_from_slice(&tensor.host_storage()[..out.len()]);
                Ok(())
            }
        }
    }

    /// Copies elements of `tensor`, from element `first` on, to `out`; waits for a GPU. On `Meta`, `out` is unchanged.
    pub fn read<T: Element>(&self, tensor: &Tensor, first: usize, out: &mut [T]) -> Result<(), OpError> {
        assert!(tensor.dtype() == T::DTYPE && first + out.len() <= tensor.elements(), "{}", tensor.name());
        match (&self.cuda, self.device) {
            (Some(cuda), _) => {
                let address = tensor.device() + (first * size_of::<T>()) as u64;
                cuda.download(address, out).map_err(cuda::error("read"))
            }
            (None, Device::Meta) => Ok(()),
            (None, _) => {
                out.copy_from_slice(&tensor.host()[first..][..out.len()]);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meta_counts_aliased_tensors_as_a_gpu_allocates_them() {
        let mut exec = Exec::meta().unwrap();
        let bf16 = |name, width| (name, [3, width], DType::Bf16);
        let tensors = exec.aliased(&[&[bf16("a", 128), bf16("b", 1)], &[bf16("c", 200)]]).unwrap();
        assert_eq!(tensors.iter().map(Tensor::bytes).collect::<Vec<_>>(), [768, 6, 1200]);
        // The second group is larger: 1200 bytes, rounded up, and not 768 and 256.
        assert_eq!(exec.allocated_bytes(), 1280);
    }
}
