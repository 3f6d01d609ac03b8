//! `norm`, `norm_rope_q`, `norm_rope_kv` and `rope` (csrc/deepseek_v4_norm.cu).

use super::{head_shape, heads, rows, run};
use crate::cuda::abi::{Dsv4Norm, InterleavedRope, NormRopeKv, NormRopeQ, Target};
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

/// `frequencies`: as in [`rope`].
pub(crate) fn norm_rope_q(
    exec: &mut Exec,
    x: &mut Tensor,
    (positions, frequencies): (&Tensor, &Tensor),
    eps: f32,
) -> Result<(), OpError> {
    let ((count, dim), dtype) = (head_shape(x), x.dtype());
    let (heads_of_token, pairs) = (x.shape()[1], frequencies.elements());
    let arguments = NormRopeQ { x, positions, frequencies, heads: count, heads_of_token, dim, pairs, eps };
    let entries = [NormRopeQ::norm_rope_q_bf16, NormRopeQ::norm_rope_q_f32];
    run(exec, "norm_rope_q", entries, dtype, arguments, heads(count))
}

/// `frequencies`: as in [`rope`].
pub(crate) fn norm_rope_kv(
    exec: &mut Exec,
    (x, weight): (&Tensor, &Tensor),
    (positions, frequencies): (&Tensor, &Tensor),
    eps: f32,
    quantize: bool,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let ((tokens, dim), dtype) = (x.rows_cols(), x.dtype());
    let (pairs, low_precision) = (frequencies.elements(), usize::from(quantize));
    let arguments = NormRopeKv { x, weight, positions, frequencies, out, dim, pairs, low_precision, eps };
    let entries = [NormRopeKv::norm_rope_kv_bf16, NormRopeKv::norm_rope_kv_f32];
    run(exec, "norm_rope_kv", entries, dtype, arguments, rows(tokens, dim))
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
