//! `ops::gated_rms_norm`: sixteen lanes a head.

use super::abi::GatedRmsNorm;
use super::delta_rule::check_shape;
use super::fp8::padded_rows;
use crate::limits::delta::{DIM, NORM_THREADS};
use crate::ops::DeltaShape;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

pub(crate) fn gated_rms_norm(
    exec: &mut Exec,
    x: &Tensor,
    projected: &Tensor,
    weight: &Tensor,
    shape: DeltaShape,
    eps: f32,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let op = "gated_rms_norm";
    check_shape(op, shape)?;
    let tokens = x.rows_cols().0;
    let arguments = GatedRmsNorm {
        x,
        projected,
        weight,
        padded: padded_rows(out),
        out,
        tokens,
        heads: shape.value_heads,
        group: shape.output_group(),
        gate: shape.channels(),
        width: shape.projected_width(),
        eps,
    };
    let launch = GatedRmsNorm::gated_rms_norm.launch(exec.gpu()?, op, arguments)?;
    let heads = NORM_THREADS / (DIM / 8); // of a block
    let blocks = (tokens * shape.value_heads).div_ceil(heads);
    if blocks == 0 {
        return Ok(());
    }
    // SAFETY: the op checked the shapes.
    unsafe { launch.early(weight).overlapped().run([blocks, 1, 1], NORM_THREADS) }
}
