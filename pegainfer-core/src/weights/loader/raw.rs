//! Loads tensors in the format of the checkpoint: packed quantised weights with their scales, f32 tensors, and indices.

use super::part_reader::Check;
use super::request::Request;
use super::{Columns, Loader, Source, SourceTensor};
use crate::exec::Exec;
use crate::tensor::{DType, OpError, Tensor};
use crate::weights::error::WeightsError;
use safetensors::Dtype;

/// Fills the current rows of `out` with dummy weights of this seed in place of a part of a tensor.
pub type FillDummy<'f> = &'f dyn Fn(&mut Exec, u64, &SourceTensor, &mut Tensor) -> Result<(), OpError>;

/// The dtype in memory. E8M0 scales are stored as bytes, because they are exponents; as numbers most of them would be
/// 0.
fn in_memory(dtype: Dtype) -> DType {
    match dtype {
        Dtype::BF16 => DType::Bf16,
        Dtype::F32 => DType::F32,
        _ => DType::U8,
    }
}

impl<'a> Loader<'a> {
    /// Loads parts of tensors of `dtype` as they are stored, stacked along their rows in the given order: `[rows]`, or
    /// the given columns, `[rows, columns]`. BF16 and F32 stay; every other dtype has one byte per element and becomes
    /// u8. `F8_E8M0` scales that are NaN are refused. `dummy` fills each part if weights are dummy weights.
    pub fn raw(
        &mut self,
        title: &str,
        parts: &[SourceTensor],
        columns: Option<&Columns>,
        dtype: Dtype,
        dummy: FillDummy<'_>,
    ) -> Result<Tensor, WeightsError> {
        let rows = parts.iter().map(|part| part.part.len()).sum();
        let shape: Vec<usize> = std::iter::once(rows).chain(columns.map(|columns| columns.part.len())).collect();
        let mut tensor = self.allocate(title, &shape, in_memory(dtype))?;
        let mut first = 0;
        for part in parts {
            tensor.set_range(first, part.part.len());
            first += part.part.len();
            self.raw_into(&mut tensor, part, columns, dtype, dummy)?;
        }
        tensor.set_rows(rows);
        Ok(tensor)
    }

    /// Variant of [`raw`](Self::raw) that loads one part into the current rows of `tensor`.
    pub fn raw_into(
        &mut self,
        tensor: &mut Tensor,
        part: &SourceTensor,
        columns: Option<&Columns>,
        dtype: Dtype,
        dummy: FillDummy<'_>,
    ) -> Result<(), WeightsError> {
        assert!(tensor.dtype() == in_memory(dtype), "{}: {dtype:?} in {}", part.name, tensor.dtype());
        let check = if dtype == Dtype::F8_E8M0 { Check::E8m0 } else { Check::Any };
        self.fill_raw(tensor, (part, columns), (dtype, check), dummy)
    }

    /// Loads the matrix `name` of indices below `count`, stored as I64, as u32, `[rows, columns]`.
    pub fn indices(
        &mut self,
        name: String,
        [rows, columns]: [usize; 2],
        count: usize,
        dummy: FillDummy<'_>,
    ) -> Result<Tensor, WeightsError> {
        let mut tensor = self.allocate(&name, &[rows, columns], DType::U32)?;
        let part = SourceTensor::whole(name, rows);
        self.fill_raw(&mut tensor, (&part, Some(&columns.into())), (Dtype::I64, Check::Below(count)), dummy)?;
        Ok(tensor)
    }

    fn fill_raw(
        &mut self,
        tensor: &mut Tensor,
        (part, columns): (&SourceTensor, Option<&Columns>),
        (dtype, check): (Dtype, Check),
        dummy: FillDummy<'_>,
    ) -> Result<(), WeightsError> {
        self.used.insert(part.name.clone());
        if self.only_shapes() {
            return Ok(());
        }
        match self.source {
            Source::Checkpoint(checkpoint) => {
                let stored = checkpoint.stored(&part.name, dtype, &part.stored_shape(columns))?;
                let stored = if dtype == Dtype::I64 { stored.as_u32() } else { stored };
                self.place(Request::new(stored, part, columns), check, tensor)
            }
            Source::Dummy { seed, .. } => {
                self.exec.install(|exec| dummy(exec, *seed, part, tensor))??;
                (self.progress)(tensor.bytes());
                Ok(())
            }
        }
    }
}
