//! An activation that kernels write right before and right after the kernel that reads it.

use super::case::{Case, Values};
use super::operands;
use crate::limits::fp8::ROW_ALIGNMENT;
use crate::ops;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::Operand;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Elements of a vector of 16 bytes: rows are whole ones.
const VECTOR: usize = 8;

/// The activation, and data to overwrite it with by row copies of `ops::gather_rows`. Copies are of bf16; tensors of
/// another dtype are viewed as rows of bf16 in place.
pub(super) struct Feed {
    /// The activation as the op reads it.
    pub input: Tensor,
    /// A view of the same memory on a GPU.
    view: Tensor,
    earlier: Tensor,
    last: Tensor,
    /// `0..rows`.
    rows: Tensor,
}

impl Feed {
    /// `None` if `operand` is not a matrix of whole vectors.
    pub fn new(exec: &mut Exec, operand: &Operand, case: &Case) -> Result<Option<Self>, OpError> {
        let &[rows, columns] = operand.shape.as_slice() else { return Ok(None) };
        // FP8 activations lie in the memory of bf16.
        let (memory_rows, memory) = match operand.dtype {
            DType::E4m3 => (rows.next_multiple_of(ROW_ALIGNMENT), DType::Bf16),
            dtype => (rows, dtype),
        };
        let width = columns * memory.size() / DType::Bf16.size();
        if rows == 0 || !width.is_multiple_of(VECTOR) {
            return Ok(None);
        }
        let mut pair = |values: Option<Values>| -> Result<(Tensor, Tensor), OpError> {
            let typed = (operand.name.as_str(), [memory_rows, columns], memory);
            let failed = |e: std::io::Error| OpError { op: "compare", message: e.to_string() };
            let aliased = exec.aliased(&[&[typed], &[("view", [memory_rows, width], DType::Bf16)]]).map_err(failed)?;
            let mut aliased = aliased.into_iter();
            let missing = || failed(std::io::Error::other("one tensor for each name"));
            let (mut tensor, view) = aliased.next().zip(aliased.next()).ok_or_else(missing)?;
            tensor.set_rows(rows);
            tensor.set_dtype(operand.dtype);
            if let Some(values) = values {
                operands::fill(exec, &mut tensor, operand, case, operands::input_seed(values))?;
            }
            Ok((tensor, view))
        };
        let (input, view) = pair(None)?;
        let (_, earlier) = pair(Some(Values::Earlier))?;
        let (_, last) = pair(Some(Values::Final))?;
        let mut ids = operands::allocate(exec, "rows", &[memory_rows], DType::U32)?;
        exec.fill_rows(&mut ids, &(0..memory_rows as u32).collect::<Vec<_>>())?;
        Ok(Some(Self { input, view, earlier, last, rows: ids }))
    }

    /// Launches the copy that overwrites the activation. Another device than a GPU is filled.
    pub fn write(&mut self, exec: &mut Exec, operand: &Operand, case: &Case, values: Values) -> Result<(), OpError> {
        let from = if values == Values::Final { &self.last } else { &self.earlier };
        ops::gather_rows(exec, from, &self.rows, &mut self.view)?;
        if exec.device() != Device::Cuda {
            operands::fill(exec, &mut self.input, operand, case, operands::input_seed(values))?;
        }
        Ok(())
    }
}
