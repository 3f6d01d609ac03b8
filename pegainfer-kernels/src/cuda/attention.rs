//! `ops::attention`, as it was chosen.

use super::attention_decode::{Prefilled, decode_bulk};
use super::attention_operands::Operands;
use super::attention_prefill::prefill;
use crate::choice::{Attention, Prefill};
use crate::ops::{AttentionBatch, HeadShape};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

#[expect(clippy::too_many_arguments, reason = "the operands of the op")]
pub(crate) fn attention(
    exec: &mut Exec,
    choice: &Attention,
    q: &Tensor,
    (k, v): (&Tensor, &Tensor),
    batch: &AttentionBatch<'_>,
    shape: HeadShape,
    scale: f32,
    out: &mut Tensor,
) -> Result<(), OpError> {
    if !matches!(shape.head_dim, 64 | 128 | 256) {
        let message = format!("head_dim {}: the GPU kernels are built for 64, 128 and 256", shape.head_dim);
        return Err(OpError { op: "attention", message });
    }
    let operands = Operands { q, k, v, batch, shape, scale: scale * std::f32::consts::LOG2_E };
    if let Some(kernel) = &choice.prefill {
        prefill(exec, kernel, operands, out)?;
    }
    // Only the warpgroup kernel releases its successor after all kernels before it are complete.
    let prefilled = match choice.prefill {
        Some(Prefill::Wgmma { .. }) => Prefilled::Overlapped,
        Some(Prefill::Mma { .. }) | None => Prefilled::Serialised,
    };
    match &choice.decode {
        None => Ok(()),
        Some(grid) => decode_bulk(exec, grid, operands, prefilled, out),
    }
}
