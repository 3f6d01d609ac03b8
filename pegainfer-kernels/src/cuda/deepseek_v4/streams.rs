//! Residual streams and copies of rows (csrc/deepseek_v4/streams.cu).

use super::{rows, run};
use crate::cpu::deepseek_v4::hyper::STREAMS;
use crate::cuda::abi::{
    AddF32, Dsv4Embed, ExpandStreams, HyperHead, HyperMerge, HyperMixF32, MeanStreams, PickRows, ResolveIds,
};
use crate::hyper_operands::{HyperSpec, HyperWeights};
use crate::limits::deepseek_v4::ROW_THREADS;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

pub(crate) fn embed(
    exec: &mut Exec,
    ids: &Tensor,
    table: &Tensor,
    first: usize,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let ((held, hidden), tokens, dtype) = (table.rows_cols(), ids.elements(), out.dtype());
    let entries = [Dsv4Embed::dsv4_embed_bf16, Dsv4Embed::dsv4_embed_f32];
    let arguments = Dsv4Embed { ids, table, out, first, rows: held, hidden };
    run(exec, "embed", entries, dtype, arguments, rows(tokens, hidden))
}

pub(crate) fn expand_streams(exec: &mut Exec, x: &Tensor, streams: &mut Tensor) -> Result<(), OpError> {
    let ((tokens, hidden), dtype) = (x.rows_cols(), x.dtype());
    let (_, threads) = rows(tokens, hidden);
    let entries = [ExpandStreams::expand_streams_bf16, ExpandStreams::expand_streams_f32];
    let arguments = ExpandStreams { x, streams, hidden };
    run(exec, "expand_streams", entries, dtype, arguments, ([tokens, STREAMS, 1], threads))
}

pub(crate) fn pick_rows(exec: &mut Exec, x: &Tensor, ids: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let ((tokens, width), dtype, picked) = (x.rows_cols(), x.dtype(), ids.elements());
    let entries = [PickRows::pick_rows_bf16, PickRows::pick_rows_f32];
    run(exec, "pick_rows", entries, dtype, PickRows { x, rows: ids, out, tokens, width }, rows(picked, width))
}

/// `column`: the first one of `out` that is written.
pub(crate) fn mean_streams(exec: &mut Exec, streams: &Tensor, column: usize, out: &mut Tensor) -> Result<(), OpError> {
    let ((tokens, pitch), dtype) = (out.rows_cols(), out.dtype());
    let hidden = streams.rows_cols().1 / STREAMS;
    let entries = [MeanStreams::mean_streams_bf16, MeanStreams::mean_streams_f32];
    let arguments = MeanStreams { streams, out, hidden, pitch, column };
    run(exec, "mean_streams", entries, dtype, arguments, rows(tokens, hidden))
}

pub(crate) fn add(exec: &mut Exec, x: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let (elements, dtype) = (out.elements(), out.dtype());
    let grid = ([elements.div_ceil(ROW_THREADS), 1, 1], ROW_THREADS);
    run(exec, "add", [AddF32::add_f32; 2], dtype, AddF32 { x, out, elements }, grid)
}

pub(crate) fn hyper_merge(
    exec: &mut Exec,
    f: &Tensor,
    (post, comb): (&Tensor, &Tensor),
    streams: &mut Tensor,
) -> Result<(), OpError> {
    let ((tokens, hidden), dtype) = (f.rows_cols(), f.dtype());
    let entries = [HyperMerge::hyper_merge_bf16, HyperMerge::hyper_merge_f32];
    run(exec, "hyper_merge", entries, dtype, HyperMerge { f, post, comb, streams, hidden }, rows(tokens, hidden))
}

pub(crate) fn hyper_head(
    exec: &mut Exec,
    streams: &Tensor,
    weights: &HyperWeights,
    spec: HyperSpec,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let ((tokens, hidden), dtype) = (out.rows_cols(), streams.dtype());
    let HyperWeights { function, base, scale } = weights;
    let HyperSpec { eps, norm_eps, .. } = spec;
    let arguments = HyperHead { streams, function, base, scale, out, hidden, eps, norm_eps };
    let entries = [HyperHead::hyper_head_bf16, HyperHead::hyper_head_f32];
    run(exec, "hyper_head", entries, dtype, arguments, rows(tokens, STREAMS * hidden))
}

/// The input of a block, for activations in f32: those in bf16 have kernels of their own.
pub(crate) fn hyper_mix_f32(
    exec: &mut Exec,
    streams: &Tensor,
    weights: &HyperWeights,
    spec: HyperSpec,
    mixed: &mut Tensor,
    (post, comb): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let (tokens, hidden) = mixed.rows_cols();
    if tokens == 0 {
        return Ok(());
    }
    let HyperWeights { function, base, scale } = weights;
    let HyperSpec { iters, eps, norm_eps } = spec;
    let arguments = HyperMixF32 { streams, function, base, scale, mixed, post, comb, hidden, iters, eps, norm_eps };
    let launch = HyperMixF32::hyper_mix_f32.launch(exec.gpu()?, "hyper_mix", arguments)?;
    // SAFETY: the op checked the shapes; a block per token.
    unsafe { launch.run([tokens, 1, 1], ROW_THREADS) }
}

pub(crate) fn resolve_ids(exec: &mut Exec, previous: &Tensor, ids: &mut Tensor) -> Result<(), OpError> {
    let (samples, count) = (previous.elements(), ids.elements());
    if count == 0 {
        return Ok(());
    }
    let launch =
        ResolveIds::resolve_ids.launch(exec.gpu()?, "resolve_ids", ResolveIds { previous, ids, samples, count })?;
    // SAFETY: a thread per token.
    unsafe { launch.run([count.div_ceil(ROW_THREADS), 1, 1], ROW_THREADS) }
}
