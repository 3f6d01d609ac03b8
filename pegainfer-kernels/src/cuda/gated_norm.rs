//! `ops::gated_rms_norm`: sixteen lanes a head.

use super::delta_rule::{DIM, check_shape};
use super::images;
use crate::ops::DeltaShape;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

const THREADS: usize = 256;

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
    let launch = exec.gpu()?.launch(op, &images::GATED_NORM, "gated_rms_norm")?;
    let launch = launch.input(x).input(projected).input(weight).output(out);
    let launch = launch.u32(tokens).u32(shape.value_heads).u32(shape.channels()).u32(shape.projected_width()).f32(eps);
    let heads = THREADS / (DIM / 8); // of a block
    let blocks = (tokens * shape.value_heads).div_ceil(heads);
    if blocks == 0 {
        return Ok(());
    }
    // SAFETY: matches csrc/gated_norm.cu; the op checked the shapes.
    unsafe { launch.early(weight).overlapped().run([blocks, 1, 1], THREADS) }
}
