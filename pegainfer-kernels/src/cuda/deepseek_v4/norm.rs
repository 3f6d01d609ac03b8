//! `norm`, and `rope`, also as a part of `sparse_attention` (csrc/deepseek_v4/norm.cu).

use super::run;
use crate::cuda::abi::{Dsv4Norm, InterleavedRope, Target};
use crate::limits::deepseek_v4::{MAX_PAIRS, ROPE_THREADS, ROW_THREADS};
use crate::ops::deepseek_v4::Rounded;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// Values of an FP8 scale, for a warp.
const GROUP: usize = 128;

/// Destinations of a rounded activation and its packed rows; null if absent.
pub(super) fn targets(low: Option<Rounded<'_>>) -> (Target<'_>, Target<'_>) {
    let (values, packed) = low.map_or((None, None), |low| (Some(low.values), low.packed));
    (values.map_or(Target::Scratch(0), Target::Tensor), packed.map_or(Target::Scratch(0), Target::Tensor))
}

/// `low`: `out` rounded to FP8.
pub(crate) fn norm(
    exec: &mut Exec,
    x: &Tensor,
    weight: &Tensor,
    eps: f32,
    out: &mut Tensor,
    low: Option<Rounded<'_>>,
) -> Result<(), OpError> {
    let ((tokens, hidden), dtype) = (x.rows_cols(), x.dtype());
    let entries = [Dsv4Norm::dsv4_norm_bf16, Dsv4Norm::dsv4_norm_f32];
    let (low, packed) = targets(low);
    let threads = (hidden.div_ceil(GROUP) * 32).min(ROW_THREADS);
    run(exec, "norm", entries, dtype, Dsv4Norm { x, weight, out, low, packed, hidden, eps }, ([tokens, 1, 1], threads))
}

/// `frequencies`: `[pairs]` f32, of the last `2 pairs` dimensions of each head.
pub(crate) fn rope(
    exec: &mut Exec,
    op: &'static str,
    x: &mut Tensor,
    positions: &Tensor,
    frequencies: &Tensor,
    inverse: bool,
) -> Result<(), OpError> {
    let (dtype, pairs) = (x.dtype(), frequencies.elements());
    let &[tokens, heads, dim] = x.shape() else {
        return Err(OpError { op, message: format!("x has shape {:?}, not tokens, heads and elements", x.shape()) });
    };
    if pairs > MAX_PAIRS {
        let message = format!("{pairs} rotated pairs of a head: the GPU kernel takes {MAX_PAIRS}");
        return Err(OpError { op, message });
    }
    let inverse = usize::from(inverse);
    let arguments = InterleavedRope { x, positions, frequencies, heads, dim, pairs, inverse };
    let entries = [InterleavedRope::interleaved_rope_bf16, InterleavedRope::interleaved_rope_f32];
    let threads = (heads * 32).clamp(32, ROPE_THREADS);
    run(exec, op, entries, dtype, arguments, ([tokens, 1, 1], threads))
}
