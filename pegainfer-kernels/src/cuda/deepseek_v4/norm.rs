//! `norm`, `head_norm` and `rope` (csrc/deepseek_v4_norm.cu).

use super::{head_shape, heads, rows, run};
use crate::cuda::abi::{Dsv4Norm, HeadNorm, InterleavedRope, Target};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// `low`: `out` rounded to FP8.
pub(crate) fn norm(
    exec: &mut Exec,
    x: &Tensor,
    weight: &Tensor,
    eps: f32,
    out: &mut Tensor,
    low: Option<&mut Tensor>,
) -> Result<(), OpError> {
    let ((tokens, hidden), dtype) = (x.rows_cols(), x.dtype());
    let entries = [Dsv4Norm::dsv4_norm_bf16, Dsv4Norm::dsv4_norm_f32];
    let low = low.map_or(Target::Scratch(0), Target::Tensor);
    run(exec, "norm", entries, dtype, Dsv4Norm { x, weight, out, low, hidden, eps }, rows(tokens, hidden))
}

pub(crate) fn head_norm(exec: &mut Exec, x: &mut Tensor, eps: f32) -> Result<(), OpError> {
    let ((count, dim), dtype) = (head_shape(x), x.dtype());
    let entries = [HeadNorm::head_norm_bf16, HeadNorm::head_norm_f32];
    run(exec, "head_norm", entries, dtype, HeadNorm { x, heads: count, dim, eps }, heads(count))
}

/// `frequencies`: `[pairs]` f32, of the last `2 pairs` dimensions of each head.
pub(crate) fn rope(
    exec: &mut Exec,
    x: &mut Tensor,
    positions: &Tensor,
    frequencies: &Tensor,
    inverse: bool,
) -> Result<(), OpError> {
    let ((count, dim), dtype) = (head_shape(x), x.dtype());
    let arguments = InterleavedRope {
        heads: count,
        heads_of_token: x.shape()[1],
        x,
        positions,
        frequencies,
        dim,
        pairs: frequencies.elements(),
        inverse: usize::from(inverse),
    };
    let entries = [InterleavedRope::interleaved_rope_bf16, InterleavedRope::interleaved_rope_f32];
    run(exec, "rope", entries, dtype, arguments, heads(count))
}
