//! `ops::decode_delta` in one kernel: one block a value head of a row.

use super::delta_rule::{DIM, check_shape};
use super::images;
use crate::ops::{DeltaShape, DeltaWeights};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// As in csrc/delta_decode.cu.
const THREADS: usize = 2 * DIM;

#[expect(clippy::too_many_arguments, reason = "the operands of the op")]
pub(crate) fn decode_delta(
    exec: &mut Exec,
    projected: &Tensor,
    weights: &DeltaWeights<'_>,
    segments: &Tensor,
    shape: DeltaShape,
    eps: f32,
    (states, tails): (&mut Tensor, &mut Tensor),
    out: &mut Tensor,
) -> Result<(), OpError> {
    let op = "decode_delta";
    check_shape(op, shape)?;
    let (rows, slots) = (projected.rows_cols().0, states.rows_cols().0);
    if rows == 0 {
        return Ok(());
    }
    let gpu = exec.gpu()?;
    let counters = gpu.counters();
    let launch = gpu.launch(op, &images::DELTA_DECODE, "decode_delta")?.input(projected).input(weights.conv);
    let launch = launch.input(weights.a_log).input(weights.dt_bias).input(weights.norm).input(segments);
    let launch = launch.output(states).output(tails).output(out).pointer(counters);
    let launch = launch.u32(shape.key_heads).u32(slots).f32(eps).overlapped();
    // No other kernel of the step writes the state.
    let launch = launch.early(weights.conv).early(weights.a_log).early(weights.dt_bias).early(weights.norm);
    let launch = launch.early(segments).early(states).early(tails);
    // SAFETY: matches csrc/delta_decode.cu; the op checked the shapes and that there are counters enough, the kernel checks
    // the segments.
    unsafe { launch.run([shape.value_heads, rows, 1], THREADS) }
}
