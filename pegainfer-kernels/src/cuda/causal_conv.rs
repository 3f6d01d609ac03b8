//! `ops::causal_conv1d`: a tile of tokens and channels a block.

use super::abi::CausalConv;
use super::delta_rule::check_shape;
use crate::choice::Conv;
use crate::limits::delta::CONV_THREADS;
use crate::ops::DeltaShape;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// Channels of a block.
const CHANNELS: usize = 8 * CONV_THREADS;

#[expect(clippy::too_many_arguments, reason = "the operands of the op")]
pub(crate) fn causal_conv1d(
    exec: &mut Exec,
    choice: Conv,
    projected: &Tensor,
    weight: &Tensor,
    segments: &Tensor,
    shape: DeltaShape,
    conv_states: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let op = "causal_conv1d";
    check_shape(op, shape)?;
    let ((tokens, channels), slots) = (out.rows_cols(), conv_states.rows_cols().0);
    let (kernel, tile) = match choice {
        Conv::Short => (CausalConv::causal_conv1d_4, 4),
        Conv::Long => (CausalConv::causal_conv1d_16, 16),
    };
    let arguments = CausalConv {
        projected,
        weight,
        segments,
        conv_states,
        out,
        channels,
        width: shape.projected_width(),
        tokens,
        count: segments.rows_cols().0,
        slots,
    };
    let launch = kernel.launch(exec.gpu()?, op, arguments)?;
    let grid = [channels.div_ceil(CHANNELS), tokens.div_ceil(tile).max(1), 1];
    // SAFETY: the op checked the shapes, the kernel checks the segments.
    unsafe { launch.early(weight).early(segments).overlapped().run(grid, CONV_THREADS) }
}
