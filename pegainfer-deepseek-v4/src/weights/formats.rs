//! Loads tensors of the official formats, or the parts that a rank holds.

use super::dummy;
use super::tensor_part::TensorPart;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, Tensor};
use pegainfer_core::weights::{Columns, Loader, SourceTensor, StoredDtype as Dtype, WeightsError};
use pegainfer_kernels::ops::{BlockScales, Matrix};
use std::ops::Range;

/// Edge of the blocks of FP8 weights.
const BLOCK: usize = 128;

/// The common loader, with the formats of DeepSeek's checkpoints.
pub(super) struct Formats<'l, 'a> {
    pub loader: &'l mut Loader<'a>,
    /// The checkpoint has FP8 and FP4 weights; else all matrices are bf16.
    pub quantized: bool,
}

impl Formats<'_, '_> {
    /// A bf16 vector.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Tensor, WeightsError> {
        self.plain(name, Dtype::BF16, &[len], &TensorPart::ALL)
    }

    /// `NAME.weight` that is bf16 in every checkpoint.
    pub fn bf16(&mut self, name: &str, n: usize, k: usize) -> Result<Matrix, WeightsError> {
        self.plain(&format!("{name}.weight"), Dtype::BF16, &[n, k], &TensorPart::ALL).map(Matrix::Bf16)
    }

    /// `NAME.weight` in FP8 with `NAME.scale`, or bf16.
    pub fn fp8(&mut self, name: &str, n: usize, k: usize, part: &TensorPart) -> Result<Matrix, WeightsError> {
        let weight = format!("{name}.weight");
        if !self.quantized {
            return self.plain(&weight, Dtype::BF16, &[n, k], part).map(Matrix::Bf16);
        }
        let scale = self.fp8_scale(name, n, k, part)?;
        Ok(Matrix::Fp8 { weight: self.plain(&weight, Dtype::F8_E4M3, &[n, k], part)?, scale })
    }

    /// Two matrices of one shape, read like [`fp8`](Self::fp8). On a GPU the codes of the second follow those of the
    /// first, so that one GEMM can use both.
    pub fn fp8_pair(
        &mut self,
        names: [String; 2],
        (n, k): (usize, usize),
        part: &TensorPart,
    ) -> Result<[Matrix; 2], WeightsError> {
        let [first, second] = &names;
        if !self.quantized {
            return Ok([self.fp8(first, n, k, part)?, self.fp8(second, n, k, part)?]);
        }
        let weights = [first, second].map(|name| format!("{name}.weight"));
        let local = part.shape([n, k]);
        let tensors = [(weights[0].as_str(), &local[..]), (weights[1].as_str(), &local[..])];
        let codes = self.loader.exec().adjacent(tensors, DType::U8).map_err(|error| WeightsError::OutOfMemory {
            name: weights[0].clone(),
            bytes: (2 * local[0] * local[1]) as u64,
            error,
        })?;
        let columns = part.columns_of(&[n, k]);
        let mut load = |name: &str, mut weight: Tensor| {
            let scale = self.fp8_scale(name, n, k, part)?;
            let stored = part.rows_of(weight.name().to_owned(), &[n, k]);
            let dummy = |exec: &mut Exec, seed, from: &SourceTensor, out: &mut Tensor| {
                dummy::fill(exec, out, (from, columns.as_ref(), Dtype::F8_E4M3), seed)
            };
            self.loader.raw_into(&mut weight, &stored, columns.as_ref(), Dtype::F8_E4M3, &dummy)?;
            Ok::<_, WeightsError>(Matrix::Fp8 { weight, scale })
        };
        let [weight, more] = codes;
        Ok([load(first, weight)?, load(second, more)?])
    }

    /// The scales of a part of the FP8 matrix `[n, k]` of this name.
    fn fp8_scale(&mut self, name: &str, n: usize, k: usize, part: &TensorPart) -> Result<BlockScales, WeightsError> {
        let blocks = [n.div_ceil(BLOCK), k.div_ceil(BLOCK)];
        self.plain(&format!("{name}.scale"), Dtype::F8_E8M0, &blocks, &part.in_blocks()).map(BlockScales::E8m0)
    }

    /// A part of `NAME.weight` in FP4 with `NAME.scale`, or in bf16, of each of several matrices `[n, k]`; the parts
    /// are stacked along their rows.
    pub fn fp4(
        &mut self,
        title: &str,
        names: &[String],
        (n, k): (usize, usize),
        part: &TensorPart,
    ) -> Result<Matrix, WeightsError> {
        if !self.quantized {
            return self.stacked(title, names, "weight", (Dtype::BF16, 1), (n, k), part).map(Matrix::Bf16);
        }
        let weight = self.stacked(title, names, "weight", (Dtype::I8, 2), (n, k), part)?;
        Ok(Matrix::Fp4 { weight, scale: self.stacked(title, names, "scale", (Dtype::F8_E8M0, 32), (n, k), part)? })
    }

    /// Variant for one of their tensors, each element of which stands for `values` columns.
    fn stacked(
        &mut self,
        title: &str,
        names: &[String],
        tail: &str,
        (dtype, values): (Dtype, usize),
        (n, k): (usize, usize),
        part: &TensorPart,
    ) -> Result<Tensor, WeightsError> {
        let packed = |columns: &Range<usize>| columns.start / values..columns.end / values;
        let part = TensorPart { rows: part.rows.clone(), columns: part.columns.as_ref().map(packed) };
        let names = names.iter().map(|name| format!("{name}.{tail}"));
        self.raw(&format!("{title}.{tail}"), names, dtype, &[n, k / values], &part)
    }

    /// Expert numbers below `count`, stored as I64 and loaded as u32, `[rows, k]`.
    pub fn ids(&mut self, name: &str, rows: usize, k: usize, count: usize) -> Result<Tensor, WeightsError> {
        let dummy = |exec: &mut Exec, seed, _: &SourceTensor, out: &mut Tensor| {
            exec.fill_rows(out, &dummy::ids(rows, k, count, seed))
        };
        self.loader.indices(name.to_owned(), [rows, k], count, &dummy)
    }

    /// A part of a tensor, as stored.
    pub fn plain(
        &mut self,
        name: &str,
        dtype: Dtype,
        shape: &[usize],
        part: &TensorPart,
    ) -> Result<Tensor, WeightsError> {
        self.raw(name, [name.to_owned()], dtype, shape, part)
    }

    /// The same part of tensors of one shape, as stored, stacked along their rows.
    fn raw(
        &mut self,
        title: &str,
        names: impl IntoIterator<Item = String>,
        dtype: Dtype,
        shape: &[usize],
        part: &TensorPart,
    ) -> Result<Tensor, WeightsError> {
        let parts: Vec<SourceTensor> = names.into_iter().map(|name| part.rows_of(name, shape)).collect();
        let columns: Option<Columns> = part.columns_of(shape);
        let dummy = |exec: &mut Exec, seed, from: &SourceTensor, out: &mut Tensor| {
            dummy::fill(exec, out, (from, columns.as_ref(), dtype), seed)
        };
        self.loader.raw(title, &parts, columns.as_ref(), dtype, &dummy)
    }
}
