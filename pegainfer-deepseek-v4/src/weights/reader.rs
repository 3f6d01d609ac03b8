//! Reads tensors of the official formats, or the part of one that a rank holds.

use super::dummy;
use super::part::Part;
use super::source::Source;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::tensor::{DType, Element, OpError, Tensor};
use pegainfer_core::weights::{StoredDtype as Dtype, WeightsError};
use pegainfer_kernels::ops::{BlockScales, Matrix};

/// Edge of the blocks of FP8 weights.
const BLOCK: usize = 128;
/// An E8M0 scale that is no number.
const E8M0_NAN: u8 = 255;

/// Brings tensors to a device.
pub(super) struct Reader<'a> {
    pub exec: &'a mut Exec,
    pub source: Source<'a>,
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
            scale: BlockScales::E8m0(self.plain(&scale, Dtype::F8_E8M0, &blocks, part.of_blocks())?),
            weight: self.plain(&weight, Dtype::F8_E4M3, &[n, k], part)?,
        })
    }

    /// A part of `NAME.weight` in FP4 with `NAME.scale`, or in bf16, of each of several matrices `[n, k]`; the parts are
    /// stacked along their rows.
    pub fn fp4(
        &mut self,
        title: &str,
        names: &[String],
        (n, k): (usize, usize),
        part: &Part,
    ) -> Result<Matrix, WeightsError> {
        if !self.quantized {
            return self.stacked(title, names, "weight", (Dtype::BF16, 1), (n, k), part).map(Matrix::Bf16);
        }
        let weight = self.stacked(title, names, "weight", (Dtype::I8, 2), (n, k), part)?;
        Ok(Matrix::Fp4 { weight, scale: self.stacked(title, names, "scale", (Dtype::F8_E8M0, 32), (n, k), part)? })
    }

    /// The same of one of their tensors, whose elements stand for `values` columns each.
    fn stacked(
        &mut self,
        title: &str,
        names: &[String],
        tail: &str,
        (dtype, values): (Dtype, usize),
        (n, k): (usize, usize),
        part: &Part,
    ) -> Result<Tensor, WeightsError> {
        let part = Part {
            rows: part.rows.clone(),
            columns: part.columns.as_ref().map(|columns| columns.start / values..columns.end / values),
        };
        let (shape, [rows, width]) = ([n, k / values], part.shape([n, k / values]));
        let mut tensor = self.allocate(&format!("{title}.{tail}"), &[names.len() * rows, width], loaded(dtype))?;
        for (i, name) in names.iter().enumerate() {
            tensor.set_range(i * rows, rows);
            self.fill(&mut tensor, &format!("{name}.{tail}"), dtype, &shape, &part)?;
        }
        tensor.set_range(0, names.len() * rows);
        Ok(tensor)
    }

    /// Expert numbers below `count`, stored as I64 and loaded as u32, `[rows, k]`.
    pub fn ids(&mut self, name: &str, rows: usize, k: usize, count: usize) -> Result<Tensor, WeightsError> {
        let mut tensor = self.allocate(name, &[rows, k], DType::U32)?;
        if self.exec.device() == Device::Meta {
            return Ok(tensor);
        }
        if let Source::Dummy(seed) = self.source {
            self.exec.fill_rows(&mut tensor, &dummy::ids(rows, k, count, seed))?;
            return Ok(tensor);
        }
        let bytes = self.bytes(name, Dtype::I64, &[rows, k], &Part::ALL)?;
        let expert = |bytes: &[u8; 8]| {
            let stored = i64::from_le_bytes(*bytes);
            let valid = u32::try_from(stored).ok().filter(|id| (*id as usize) < count);
            valid.ok_or_else(|| {
                wrong(name, &format!("I64 with expert {stored}"), &format!("expert numbers below {count}"))
            })
        };
        let ids: Vec<u32> = bytes.as_chunks::<8>().0.iter().map(expert).collect::<Result<_, _>>()?;
        self.exec.fill_rows(&mut tensor, &ids)?;
        (self.progress)(tensor.bytes());
        Ok(tensor)
    }

    /// A part of a tensor, as stored.
    pub fn plain(&mut self, name: &str, dtype: Dtype, shape: &[usize], part: Part) -> Result<Tensor, WeightsError> {
        let mut local = shape.to_vec();
        for (n, range) in local.iter_mut().zip([&part.rows, &part.columns]) {
            *n = range.as_ref().map_or(*n, ExactSizeIterator::len);
        }
        let mut tensor = self.allocate(name, &local, loaded(dtype))?;
        self.fill(&mut tensor, name, dtype, shape, &part)?;
        Ok(tensor)
    }

    /// Fills the present rows of `tensor` with a part of a tensor of the checkpoint.
    fn fill(
        &mut self,
        tensor: &mut Tensor,
        name: &str,
        dtype: Dtype,
        shape: &[usize],
        part: &Part,
    ) -> Result<(), WeightsError> {
        if self.exec.device() == Device::Meta {
            return Ok(());
        }
        if let Source::Dummy(seed) = self.source {
            let Self { exec, progress, .. } = self;
            progress(tensor.bytes());
            return Ok(exec.install(|exec| dummy::fill(exec, tensor, name, (dtype, shape), part, seed))??);
        }
        let bytes = self.bytes(name, dtype, shape, part)?;
        match loaded(dtype) {
            DType::Bf16 => copy(self.exec, tensor, &bytes, half::bf16::from_le_bytes)?,
            DType::F32 => copy(self.exec, tensor, &bytes, f32::from_le_bytes)?,
            _ => copy(self.exec, tensor, &bytes, |[byte]: [u8; 1]| byte)?,
        }
        (self.progress)(tensor.bytes());
        Ok(())
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
        let Source::Checkpoint(checkpoint) = self.source else {
            return Err(WeightsError::MissingTensor { name: name.to_owned() });
        };
        let stored = checkpoint.stored(name, dtype, shape)?;
        let width = shape[1..].iter().product::<usize>() * dtype.bitsize() / 8;
        let rows = part.rows.clone().unwrap_or(0..shape[0]);
        let mut bytes = vec![0; rows.len() * width];
        stored.read(rows.start * width, &mut bytes)?;
        if dtype == Dtype::F8_E8M0 && bytes.contains(&E8M0_NAN) {
            return Err(wrong(name, "F8_E8M0 with a scale that is not a number", "scales of 2^-127 to 2^127"));
        }
        let Some(columns) = &part.columns else { return Ok(bytes) };
        let columns = columns.start * dtype.bitsize() / 8..columns.end * dtype.bitsize() / 8;
        Ok(bytes.chunks_exact(width).flat_map(|row| &row[columns.clone()]).copied().collect())
    }
}

/// The dtype in memory. E8M0 scales are bytes: they are exponents, and as numbers most of them would be 0.
fn loaded(dtype: Dtype) -> DType {
    match dtype {
        Dtype::BF16 => DType::Bf16,
        Dtype::F32 => DType::F32,
        _ => DType::U8,
    }
}

/// Copies little-endian `bytes` to the present rows of `tensor`.
fn copy<T: Element, const N: usize>(
    exec: &mut Exec,
    tensor: &mut Tensor,
    bytes: &[u8],
    value: impl Fn([u8; N]) -> T + Sync,
) -> Result<(), OpError> {
    let elements = tensor.elements();
    exec.write(tensor, 0..elements, |first, out: &mut [T]| {
        let from = bytes.as_chunks::<N>().0[first..].iter();
        out.iter_mut().zip(from).for_each(|(to, from)| *to = value(*from));
    })
}

fn wrong(name: &str, found: &str, expected: &str) -> WeightsError {
    WeightsError::Mismatch { name: name.to_owned(), found: found.to_owned(), expected: expected.to_owned() }
}
