//! `ops::decode_delta` in one kernel: one block a value head of a row.

use super::abi::DecodeDelta;
use super::delta_rule::check_shape;
use super::fp8::padded_rows;
use crate::limits::delta::DECODE_THREADS;
use crate::ops::{DeltaShape, DeltaWeights};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

#[expect(clippy::too_many_arguments, reason = "the operands of the op")]
pub(crate) fn decode_delta(
    exec: &mut Exec,
    projected: &Tensor,
    weights: &DeltaWeights<'_>,
    segments: &Tensor,
    shape: DeltaShape,
    eps: f32,
    (states, conv_states): (&mut Tensor, &mut Tensor),
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
    let DeltaWeights { conv, a_log, dt_bias, norm } = *weights;
    let arguments = DecodeDelta {
        projected,
        conv,
        a_log,
        dt_bias,
        norm,
        segments,
        states: &mut *states,
        conv_states: &mut *conv_states,
        padded: padded_rows(out),
        out,
        counters,
        key_heads: shape.key_heads,
        output_group: shape.output_group(),
        slots,
        eps,
    };
    let launch = DecodeDelta::decode_delta.launch(gpu, op, arguments)?.overlapped();
    // No other kernel of the step writes the state.
    let launch = launch.early(conv).early(a_log).early(dt_bias).early(norm);
    let launch = launch.early(segments).early(states).early(conv_states);
    // SAFETY: the op checked the shapes and that there are enough counters; the kernel checks the segments.
    unsafe { launch.run([shape.value_heads, rows, 1], DECODE_THREADS) }
}
