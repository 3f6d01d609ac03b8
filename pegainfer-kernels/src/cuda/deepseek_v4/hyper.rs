//! Hyper-connections: the choice of `hyper_mix`, and `hyper_merge_mix_norm` (csrc/deepseek_v4/hyper.cu).

use super::streams::hyper_mix_f32;
use crate::cuda::abi::{HyperMergeProducts, HyperMixNorm, HyperOutputMixing, Target};
use crate::hyper_operands::{HyperSpec, HyperWeights};
use crate::limits::deepseek_v4_hyper::{
    BLOCKS, COLUMNS, MAX_NORM_THREADS, MIXING_THREADS, MIXING_TOKENS, NORM_WARP_COLUMNS, STRIDE, THREADS, TILE_TOKENS,
};
use pegainfer_core::cuda::WORKSPACE_BYTES;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Largest hidden size: a thread of `hyper_mix_norm` has eight columns, and its last warp none.
const MAX_HIDDEN: usize = (MAX_NORM_THREADS / 32 - 1) * NORM_WARP_COLUMNS;
/// Tokens of a launch: their partial sums fit the workspace.
const MAX_TOKENS: usize = 4096;
/// Number of tokens from which Sinkhorn's iteration has its own kernel: blocks of `hyper_mix_norm` then run in several
/// waves and are faster without it.
const MANY_TOKENS: usize = 1024;
const _: () = assert!(MAX_TOKENS * (MAX_HIDDEN / COLUMNS) * STRIDE * 4 <= WORKSPACE_BYTES);

/// `hyper_mix` on checked operands.
pub(crate) fn hyper_mix(
    exec: &mut Exec,
    streams: &Tensor,
    weights: &HyperWeights,
    spec: HyperSpec,
    mixed: &mut Tensor,
    (post, comb): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let mix = if streams.dtype() == DType::F32 { hyper_mix_f32 } else { crate::cuda::hyper_mix };
    mix(exec, streams, weights, spec, mixed, (post, comb))
}

/// True if [`hyper_merge_mix_norm`] takes streams of this dtype and width.
pub(crate) fn has_hyper_merge_mix_norm(dtype: DType, hidden: usize) -> bool {
    dtype == DType::Bf16 && hidden.is_multiple_of(NORM_WARP_COLUMNS) && hidden <= MAX_HIDDEN
}

/// `hyper_merge_mix_norm` on checked operands that [`has_hyper_merge_mix_norm`] accepts.
pub(crate) fn hyper_merge_mix_norm(
    exec: &mut Exec,
    (f, streams): (&Tensor, &mut Tensor),
    (weights, spec): (&HyperWeights, HyperSpec),
    (post, comb): (&mut Tensor, &mut Tensor),
    (norm_weight, norm_eps): (&Tensor, f32),
    (out, mut low, mut packed): (&mut Tensor, Option<&mut Tensor>, Option<&mut Tensor>),
) -> Result<(), OpError> {
    let op = "hyper_merge_mix_norm";
    let (tokens, hidden) = out.rows_cols();
    let splits = hidden / COLUMNS;
    let HyperWeights { function, base, scale } = weights;
    let HyperSpec { iters, eps, norm_eps: streams_eps } = spec;
    let gpu = exec.gpu()?;
    let partial = gpu.workspace();
    let resident = (BLOCKS * gpu.multiprocessors() / splits).max(1);
    for first in (0..tokens).step_by(MAX_TOKENS) {
        let tokens = MAX_TOKENS.min(tokens - first);
        let arguments = HyperMergeProducts { f, post, comb, streams, function, partial, first, tokens, hidden };
        let launch = HyperMergeProducts::hyper_merge_products.launch(gpu, op, arguments)?.early(function).overlapped();
        let tiles = tokens.div_ceil(TILE_TOKENS);
        let groups = tiles.div_ceil(tiles.div_ceil(resident));
        // SAFETY: the op checked the shapes; the partial sums fit the workspace, see MAX_TOKENS.
        unsafe { launch.run([splits, groups, 1], THREADS)? };
        let low = low.as_deref_mut().map_or(Target::Scratch(0), Target::Tensor);
        let packed = packed.as_deref_mut().map_or(Target::Scratch(0), Target::Tensor);
        let (streams, weight) = (&*streams, norm_weight);
        let (many, post, comb) = (tokens >= MANY_TOKENS, &mut *post, &mut *comb);
        #[rustfmt::skip]
        let arguments = HyperMixNorm {
            streams, partial, base, scale, weight, post: &mut *post, comb: &mut *comb, out, low, packed, first, hidden, iters, eps, streams_eps, norm_eps,
        };
        let launch = HyperMixNorm::hyper_mix_norm.launch(gpu, op, arguments)?;
        let launch = launch.early(weight).early(base).early(scale).overlapped();
        // SAFETY: the op checked the shapes; a block has one token, and each thread eight columns, except in the last
        // warp.
        unsafe { launch.run([tokens, 1, 1], hidden / 8 + if many { 0 } else { 32 })? };
        if many {
            let arguments = HyperOutputMixing { partial, post, comb, first, tokens, hidden, iters, eps };
            let launch = HyperOutputMixing::hyper_output_mixing.launch(gpu, op, arguments)?.overlapped();
            // SAFETY: the kernel before wrote the mixing values of all tokens.
            unsafe { launch.run([tokens.div_ceil(MIXING_TOKENS), 1, 1], MIXING_THREADS)? };
        }
    }
    Ok(())
}
