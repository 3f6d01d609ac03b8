//! Tensors: a name, a shape, a dtype and, unless the device is `Meta`, storage.

use crate::cuda::{DeviceBuffer, Target};
use half::bf16;
use memmap2::MmapMut;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use thiserror::Error;

/// Element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// bfloat16: weights, activations, KV.
    Bf16,
    /// IEEE single: logits, RoPE table.
    F32,
    /// Token ids, positions, block tables.
    U32,
    /// Raw bytes of a packed format: FP8, FP4 pairs, E8M0 scales.
    U8,
    /// Activations rounded to FP8: e4m3 codes of all rows, followed by an f32 scale for each block of columns of each
    /// row. A kernel format in the memory of a bf16 tensor ([`Tensor::set_dtype`]).
    E4m3,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 | Self::U32 => 4,
            Self::U8 | Self::E4m3 => 1,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::U32 => "u32",
            Self::U8 => "u8",
            Self::E4m3 => "e4m3",
        })
    }
}

/// Error of an op: unsupported operands, or a device failure. The message is for the log.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{op}: {message}")]
pub struct OpError {
    /// Name of the op.
    pub op: &'static str,
    /// Description of the error.
    pub message: String,
}

/// A Rust type of tensor elements on the host.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// The [`DType`] of this type.
    const DTYPE: DType;
}

impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;
}
impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for u32 {
    const DTYPE: DType = DType::U32;
}
impl Element for u8 {
    const DTYPE: DType = DType::U8;
}

/// Row-major tensor. The leading dimension can be set to any number of the allocated rows, so one workspace serves
/// steps of every size.
#[derive(Debug)]
pub struct Tensor {
    name: String,
    id: u32,
    shape: Vec<usize>,
    first_row: usize,
    max_rows: usize,
    dtype: DType,
    /// Type of the elements that memory was allocated for.
    allocated: DType,
    storage: Storage,
}

/// Storage of a tensor's bytes.
#[derive(Debug)]
pub(crate) enum Storage {
    /// Host memory, which several tensors may read.
    Host(Arc<MmapMut>),
    /// Device memory: a buffer, which several tensors may share, and the offset in bytes.
    Device(Arc<DeviceBuffer>, usize),
    /// No storage.
    Meta,
}

impl Storage {
    /// Allocates zero-filled memory of this process; pages are mapped on first touch.
    pub fn host(bytes: usize) -> std::io::Result<Self> {
        anonymous(bytes).map(|map| Self::Host(Arc::new(map)))
    }
}

impl Tensor {
    /// A tensor of this shape in `storage`, which must be large enough.
    pub(crate) fn new(name: &str, id: u32, shape: &[usize], dtype: DType, storage: Storage) -> Self {
        let max_rows = shape.first().copied().unwrap_or(1);
        Self {
            name: name.to_owned(),
            id,
            shape: shape.to_vec(),
            first_row: 0,
            max_rows,
            dtype,
            allocated: dtype,
            storage,
        }
    }

    /// Name of the tensor in the model, for logs and records.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Id, unique within its `Exec`.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Current dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements of the current shape.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Size of the current shape in bytes.
    pub fn bytes(&self) -> u64 {
        (self.elements() * self.dtype.size()) as u64
    }

    /// The leading dimension and the product of the others.
    pub fn rows_cols(&self) -> (usize, usize) {
        let rows = self.shape.first().copied().unwrap_or(1);
        (rows, self.shape.iter().skip(1).product())
    }

    /// Number of allocated rows.
    pub fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// Number of allocated bytes.
    pub fn capacity(&self) -> usize {
        self.max_rows * self.rows_cols().1 * self.allocated.size()
    }

    /// Changes the element type to one that is no larger than the allocated one. The values are lost.
    pub fn set_dtype(&mut self, dtype: DType) {
        assert!(dtype.size() <= self.allocated.size() && self.first_row == 0, "{}: {dtype}", self.name);
        self.dtype = dtype;
    }

    /// Some of the allocated rows, in the same memory, which must not be written any more: in host memory that panics.
    pub fn row_range(&self, rows: Range<usize>) -> Self {
        let (end, allocated) = (rows.end, self.max_rows);
        assert!(end <= allocated, "{}: rows up to {end}, but {allocated} were allocated", self.name);
        let storage = match &self.storage {
            Storage::Host(map) => Storage::Host(map.clone()),
            Storage::Device(buffer, first) => Storage::Device(buffer.clone(), *first),
            Storage::Meta => Storage::Meta,
        };
        let shape = std::iter::once(rows.len()).chain(self.shape.iter().skip(1).copied()).collect();
        Self { name: self.name.clone(), shape, first_row: rows.start, max_rows: end, storage, ..*self }
    }

    /// Sets the leading dimension to the first `rows` allocated rows.
    pub fn set_rows(&mut self, rows: usize) {
        self.set_range(0, rows);
    }

    /// Sets the leading dimension to `rows` of the allocated rows, from row `first` on.
    pub fn set_range(&mut self, first: usize, rows: usize) {
        let end = first + rows;
        assert!(end <= self.max_rows, "{}: {end} rows, but {} were allocated", self.name, self.max_rows);
        self.first_row = first;
        self.shape[0] = rows;
    }

    /// Lends the current rows to `f` as rows of `columns` elements; the number of columns must be a multiple of that.
    pub fn as_rows_of<R>(&mut self, columns: usize, f: impl FnOnce(&mut Self) -> R) -> R {
        let (rows, width) = self.rows_cols();
        assert!(width.is_multiple_of(columns), "{}: {width} columns are no rows of {columns}", self.name);
        let (parts, first_row, max_rows) = (width / columns, self.first_row, self.max_rows);
        let shape = std::mem::replace(&mut self.shape, vec![rows * parts, columns]);
        (self.first_row, self.max_rows) = (first_row * parts, max_rows * parts);
        let result = f(self);
        (self.shape, self.first_row, self.max_rows) = (shape, first_row, max_rows);
        result
    }

    /// Lends the first allocated elements to `f` as a tensor of this shape and dtype.
    pub fn as_shape<R>(&mut self, shape: &[usize], dtype: DType, f: impl FnOnce(&mut Self) -> R) -> R {
        let (bytes, lent) = (self.capacity(), shape.iter().product::<usize>() * dtype.size());
        assert!(lent <= bytes, "{}: {lent} bytes, but {bytes} were allocated", self.name);
        let max_rows = shape.first().copied().unwrap_or(1);
        let own = (std::mem::replace(&mut self.shape, shape.to_vec()), self.first_row, self.max_rows, self.dtype);
        (self.first_row, self.max_rows, self.dtype) = (0, max_rows, dtype);
        let result = f(self);
        (self.shape, self.first_row, self.max_rows, self.dtype) = own;
        result
    }

    /// Number of elements before the first row.
    fn offset(&self) -> usize {
        self.first_row * self.rows_cols().1
    }

    /// The elements in host memory. Panics if dtype or device are wrong: ops check them first.
    pub fn host<T: Element>(&self) -> &[T] {
        assert_eq!(self.dtype, T::DTYPE, "{}", self.name);
        let Storage::Host(data) = &self.storage else { panic!("{} is not on the host", self.name) };
        &bytemuck::cast_slice(data)[self.offset()..][..self.elements()]
    }

    /// Like [`host`](Self::host), mutable.
    pub fn host_mut<T: Element>(&mut self) -> &mut [T] {
        assert_eq!(self.dtype, T::DTYPE, "{}", self.name);
        let (offset, elements) = (self.offset(), self.elements());
        &mut bytemuck::cast_slice_mut(self.host_storage_mut())[offset..][..elements]
    }

    /// The bytes of the elements in host memory. Panics on another device.
    pub(crate) fn host_bytes(&self) -> &[u8] {
        let Storage::Host(data) = &self.storage else { panic!("{} is not on the host", self.name) };
        &data[self.offset() * self.dtype.size()..][..self.bytes() as usize]
    }

    /// Mutable variant of [`host_bytes`](Self::host_bytes). Also panics if another tensor reads the memory.
    pub(crate) fn host_bytes_mut(&mut self) -> &mut [u8] {
        let (first, bytes) = (self.offset() * self.dtype.size(), self.bytes() as usize);
        &mut self.host_storage_mut()[first..][..bytes]
    }

    /// All bytes in host memory, for any element type. Panics on another device.
    pub fn host_storage(&self) -> &[u8] {
        let Storage::Host(data) = &self.storage else { panic!("{} is not on the host", self.name) };
        data
    }

    /// Mutable variant of [`host_storage`](Self::host_storage). Also panics if another tensor reads the memory.
    pub fn host_storage_mut(&mut self) -> &mut [u8] {
        let Storage::Host(data) = &mut self.storage else { panic!("{} is not on the host", self.name) };
        let Some(data) = Arc::get_mut(data) else { panic!("{} is read by another tensor", self.name) };
        data
    }

    /// Device address of the first element. Panics on another device.
    pub fn device(&self) -> u64 {
        let Storage::Device(buffer, first) = &self.storage else { panic!("{} is not on a GPU", self.name) };
        buffer.address() + (first + self.offset() * self.dtype.size()) as u64
    }

    /// The device memory of the elements, as an upload target; `None` if the tensor is not on a GPU.
    pub(crate) fn target(&self) -> Option<Target> {
        let Storage::Device(buffer, _) = &self.storage else { return None };
        Some(Target::new(buffer.clone(), self.device(), self.bytes() as usize))
    }
}

/// Maps zero pages, huge ones if the system has them: weights are streamed, and 4 KiB pages cost TLB misses.
fn anonymous(bytes: usize) -> std::io::Result<MmapMut> {
    let map = MmapMut::map_anon(bytes.max(1))?;
    if bytes >= 2 << 20 {
        #[cfg(target_os = "linux")]
        if let Err(error) = map.advise(memmap2::Advice::HugePage) {
            log::debug!("no huge pages: {error}");
        }
    }
    Ok(map)
}
