//! Weights of the experts of a mixture.

use super::fp8;
use crate::ops::moe::Experts;
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::OpError;

/// Operands of `experts` before the weights: x, numbers and weights of the chosen experts.
pub(super) const BEFORE_WEIGHTS: usize = 3;

/// The weights of `experts`, whose operands are those of `gate_up`, then as many of `down`; `None` for other ops.
pub(super) fn weights(exec: &mut Exec, record: &OpRecord) -> Result<Option<Experts>, OpError> {
    if record.op != "experts" {
        return Ok(None);
    }
    let operands = &record.reads[BEFORE_WEIGHTS..];
    let (gate_up, down) = operands.split_at(operands.len() / 2);
    let (gate_up, down) = (fp8::matrix(exec, gate_up)?, fp8::matrix(exec, down)?);
    let count = down.shape().0 / gate_up.shape().1;
    // A shared expert runs like the others; only the bytes of a record tell it apart.
    Ok(Some(Experts { gate_up, down, count, shared: false }))
}
