//! Reads tensors of the official formats, or the part of one that a rank holds.

use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::tensor::{DType, Element, Tensor};
use pegainfer_core::weights::{Checkpoint, StoredDtype as Dtype, WeightsError};
use pegainfer_kernels::ops::deepseek_v4::Matrix;
use std::ops::Range;

/// Edge of the blocks of FP8 weights.
const BLOCK: usize = 128;
/// An E8M0 scale that is no number.
const E8M0_NAN: u8 = 255;

/// Which rows and columns of a tensor to read; `None` is all.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub rows: Option<Range<usize>>,
    pub columns: Option<Range<usize>>,
}

impl Part {
    pub const ALL: Self = Self { rows: None, columns: None };

    /// The part of the scales that belongs to this part of an FP8 weight.
    fn of_blocks(&self) -> Self {
        let blocks = |range: &Range<usize>| range.start / BLOCK..range.end.div_ceil(BLOCK);
        Self { rows: self.rows.as_ref().map(blocks), columns: self.columns.as_ref().map(blocks) }
    }
}

/// Brings tensors of a checkpoint to a device.
pub(super) struct Reader<'a> {
    pub exec: &'a mut Exec,
    /// Not needed on `Meta`.
    pub checkpoint: Option<&'a Checkpoint>,
    /// The checkpoint has FP8 and FP4 weights; else all matrices are bf16.
    pub quantized: bool,
    pub progress: &'a mut dyn FnMut(u64),
}

impl Reader<'_> {
    /// A bf16 vector.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Tensor, WeightsError> {
        self.plain(name, Dtype::BF16, &[len], Part::ALL)
    }

    /// `NAME.weight` that is bf16 in every checkpoint.
    pub fn bf16(&mut self, name: &str, n: usize, k: usize) -> Result<Matrix, WeightsError> {
        self.plain(&format!("{name}.weight"), Dtype::BF16, &[n, k], Part::ALL).map(Matrix::Bf16)
    }

    /// `NAME.weight` in FP8 with `NAME.scale`, or bf16.
    pub fn fp8(&mut self, name: &str, n: usize, k: usize, part: Part) -> Result<Matrix, WeightsError> {
        let (weight, scale) = (format!("{name}.weight"), format!("{name}.scale"));
        if !self.quantized {
            return self.plain(&weight, Dtype::BF16, &[n, k], part).map(Matrix::Bf16);
        }
        let blocks = [n.div_ceil(BLOCK), k.div_ceil(BLOCK)];
        Ok(Matrix::Fp8 {
            scale: self.scales(&scale, &blocks, part.of_blocks())?,
            weight: self.plain(&weight, Dtype::F8_E4M3, &[n, k], part)?,
        })
    }

    /// `NAME.weight` in FP4 with `NAME.scale`, or bf16.
    pub fn fp4(&mut self, name: &str, n: usize, k: usize) -> Result<Matrix, WeightsError> {
        let (weight, scale) = (format!("{name}.weight"), format!("{name}.scale"));
        if !self.quantized {
            return self.plain(&weight, Dtype::BF16, &[n, k], Part::ALL).map(Matrix::Bf16);
        }
        Ok(Matrix::Fp4 {
            weight: self.plain(&weight, Dtype::I8, &[n, k / 2], Part::ALL)?,
            scale: self.scales(&scale, &[n, k / 32], Part::ALL)?,
        })
    }

    /// E8M0 scales, as bytes: they are exponents, and reading them as numbers would make most of them 0.
    fn scales(&mut self, name: &str, shape: &[usize], part: Part) -> Result<Tensor, WeightsError> {
        let tensor = self.plain(name, Dtype::F8_E8M0, shape, part)?;
        if self.exec.device() != Device::Meta && tensor.host::<u8>().contains(&E8M0_NAN) {
            return Err(wrong(name, "F8_E8M0 with a scale that is not a number", "scales of 2^-127 to 2^127"));
        }
        Ok(tensor)
    }

    /// Expert numbers below `count`, stored as I64 and loaded as u32, `[rows, k]`.
    pub fn ids(&mut self, name: &str, rows: usize, k: usize, count: usize) -> Result<Tensor, WeightsError> {
        let mut tensor = self.allocate(name, &[rows, k], DType::U32)?;
        if self.exec.device() == Device::Meta {
            return Ok(tensor);
        }
        let bytes = self.bytes(name, Dtype::I64, &[rows, k], &Part::ALL)?;
        for (id, bytes) in tensor.host_mut::<u32>().iter_mut().zip(bytes.as_chunks::<8>().0) {
            let stored = i64::from_le_bytes(*bytes);
            let valid = u32::try_from(stored).ok().filter(|id| (*id as usize) < count);
            *id = valid.ok_or_else(|| {
                wrong(name, &format!("I64 with expert {stored}"), &format!("expert numbers below {count}"))
            })?;
        }
        (self.progress)(tensor.bytes());
        Ok(tensor)
    }

    /// A part of a tensor, as stored.
    pub fn plain(&mut self, name: &str, dtype: Dtype, shape: &[usize], part: Part) -> Result<Tensor, WeightsError> {
        let mut local = shape.to_vec();
        for (n, range) in local.iter_mut().zip([&part.rows, &part.columns]) {
            *n = range.as_ref().map_or(*n, ExactSizeIterator::len);
        }
        let loaded = match dtype {
            Dtype::BF16 => DType::Bf16,
            Dtype::F32 => DType::F32,
            _ => DType::U8,
        };
        let mut tensor = self.allocate(name, &local, loaded)?;
        if self.exec.device() == Device::Meta {
            return Ok(tensor);
        }
        let bytes = self.bytes(name, dtype, shape, &part)?;
        match loaded {
            DType::Bf16 => fill(&mut tensor, &bytes, |b: [u8; 2]| half::bf16::from_le_bytes(b)),
            DType::F32 => fill(&mut tensor, &bytes, f32::from_le_bytes),
            _ => tensor.host_mut::<u8>().copy_from_slice(&bytes),
        }
        (self.progress)(tensor.bytes());
        Ok(tensor)
    }

    fn allocate(&mut self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor, WeightsError> {
        self.exec.tensor(name, shape, dtype).map_err(|error| WeightsError::OutOfMemory {
            name: name.to_owned(),
            bytes: (shape.iter().product::<usize>() * dtype.size()) as u64,
            error,
        })
    }

    /// The bytes of a part of the tensor `name`, row-major.
    fn bytes(&self, name: &str, dtype: Dtype, shape: &[usize], part: &Part) -> Result<Vec<u8>, WeightsError> {
        let checkpoint = self.checkpoint.ok_or_else(|| WeightsError::MissingTensor { name: name.to_owned() })?;
        let stored = checkpoint.stored(name, dtype, shape)?;
        let width = shape[1..].iter().product::<usize>() * dtype.bitsize() / 8;
        let rows = part.rows.clone().unwrap_or(0..shape[0]);
        let mut bytes = vec![0; rows.len() * width];
        stored.read(rows.start * width, &mut bytes)?;
        let Some(columns) = &part.columns else { return Ok(bytes) };
        let columns = columns.start * dtype.bitsize() / 8..columns.end * dtype.bitsize() / 8;
        Ok(bytes.chunks_exact(width).flat_map(|row| &row[columns.clone()]).copied().collect())
    }
}

fn fill<T: Element, const N: usize>(tensor: &mut Tensor, bytes: &[u8], value: impl Fn([u8; N]) -> T) {
    tensor.host_mut::<T>().iter_mut().zip(bytes.as_chunks::<N>().0).for_each(|(to, from)| *to = value(*from));
}

fn wrong(name: &str, found: &str, expected: &str) -> WeightsError {
    WeightsError::Mismatch { name: name.to_owned(), found: found.to_owned(), expected: expected.to_owned() }
}
