//! `ops::gated_delta_rule`: each block scans a chain of segments for half a head's matrix.

use super::abi::DeltaRecurrent;
use super::vectors;
use crate::limits::delta::{DIM, RULE_PARTS, RULE_THREADS, WIDTH};
use crate::ops::{DeltaInputs, DeltaShape};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// The shapes that the kernels of a gated delta rule layer are built for.
pub(super) fn check_shape(op: &'static str, shape: DeltaShape) -> Result<(), OpError> {
    let DeltaShape { key_dim, value_dim, conv_width, .. } = shape;
    if (key_dim, value_dim, conv_width) != (DIM, DIM, WIDTH) {
        let message = format!(
            "heads of {key_dim} and {value_dim}, a convolution of width {conv_width}: the GPU kernels are built for {DIM}, {DIM} and {WIDTH}"
        );
        return Err(OpError { op, message });
    }
    vectors(op, shape.projected_width())
}

/// The rule, token by token, on the chains of segments (csrc/delta_rule/segments.cuh) with at most `longest` tokens; the data of
/// other chains stays unchanged.
pub(crate) fn delta_recurrent(
    exec: &mut Exec,
    inputs: &DeltaInputs<'_>,
    shape: DeltaShape,
    states: &mut Tensor,
    out: &mut Tensor,
    longest: usize,
) -> Result<(), OpError> {
    let op = "gated_delta_rule";
    check_shape(op, shape)?;
    let (segments, slots) = (inputs.segments.rows_cols().0, states.rows_cols().0);
    if segments == 0 {
        return Ok(());
    }
    let arguments = DeltaRecurrent {
        mixed: inputs.mixed,
        projected: inputs.projected,
        a_log: inputs.a_log,
        dt_bias: inputs.dt_bias,
        segments: inputs.segments,
        states,
        out,
        key_heads: shape.key_heads,
        width: shape.projected_width(),
        tokens: inputs.mixed.rows_cols().0,
        slots,
        longest: longest.min(u32::MAX as usize),
    };
    let launch = DeltaRecurrent::delta_recurrent.launch(exec.gpu()?, op, arguments)?.overlapped();
    // The kernel also reads the slots of its own chains in `states`, which the preceding inter-chunk scan does not
    // touch.
    let launch = launch.early(inputs.segments).early(inputs.a_log).early(inputs.dt_bias);
    // SAFETY: the op checked the shapes, the kernel checks the segments.
    unsafe { launch.run([RULE_PARTS, shape.value_heads, segments], RULE_THREADS) }
}
