//! Attention of one layer: window, compressed entries, and the projections around them.

use super::Pass;
use crate::config::LayerKind;
use crate::shard::RankParts;
use crate::state::{Compressed, LayerState, compressor_spec};
use crate::weights::{Attention, Compressor};
use crate::workspace::{Pair, Workspace};
use pegainfer_core::tensor::{DType, OpError};
use pegainfer_kernels::ops::deepseek_v4::{
    self as ops, Activation, CompressorSpec, KeptTokens, LatentOutputs, Latents, NewEntries, PAGE_TOKENS, Projected,
    Projections, Queries, SelectSpec, Split, TokenShare, Visible,
};
use pegainfer_runtime::is_prompt_step;

impl Pass<'_> {
    /// Attention over `normed`; writes `output`. State is read before it is written, because a chunk may replace a
    /// whole window.
    pub(super) fn attention(
        &mut self,
        weights: &Attention,
        kind: LayerKind,
        state: &mut LayerState,
    ) -> Result<(), OpError> {
        self.project_input(weights, kind)?;
        self.latents(weights, kind, state)?;
        self.queries(weights, kind, state)?;
        if let Some(index) = &state.index {
            self.choose(index, kind)?;
        }
        let columns = weights.wo_a.shape().1;
        let Self { exec, rotations, inputs, work, .. } = self;
        let batch = inputs.batch();
        let visible = match (&state.compressed, kind.ratio()) {
            (Some(Compressed { entries, .. }), _) if kind == LayerKind::Sparse => {
                Visible::Chosen { entries, chosen: &work.chosen }
            }
            (Some(Compressed { entries, .. }), Some(ratio)) => Visible::All { entries, ratio },
            _ => Visible::Nothing,
        };
        let split = match &mut work.attended_split {
            Some(packed) if ops::takes_split(exec, &work.attended, &weights.wo_a)? => {
                packed.set_rows(work.attended.shape()[0]);
                Some(Split { packed, columns })
            }
            _ => None,
        };
        let is_split = split.is_some();
        let (keys, sink) = ((&work.kv, &mut state.window), (&weights.sink, rotations.of(kind)));
        ops::sparse_attention(exec, &work.q, keys, visible, sink, &batch, (&mut work.attended, split))?;
        self.project_output(weights, is_split)
    }

    /// The GEMMs of `normed`: inputs of the norms of queries and keys, of the compressors and of the indexer.
    pub(super) fn project_input(&mut self, weights: &Attention, kind: LayerKind) -> Result<(), OpError> {
        let share = self.shared_tokens();
        let Self { exec, work, communicator, .. } = self;
        let Workspace { normed, qr_raw, kv_raw, sparse, heavy, index, index_weights, .. } = &mut **work;
        let projections = Projections {
            low: [&weights.wq_a, &weights.wkv],
            pairs: [
                weights.compressor.as_ref().map(Compressor::matrices),
                weights.indexer.as_ref().map(|indexer| indexer.compressor.matrices()),
            ],
            last: weights.indexer.as_ref().map(|indexer| &indexer.weights_proj),
        };
        let main = if kind == LayerKind::Sparse { sparse } else { heavy };
        let mut out = Projected {
            low: [qr_raw, kv_raw],
            pairs: [weights.compressor.as_ref().map(|_| main.both()), weights.indexer.as_ref().map(|_| index.both())],
            last: weights.indexer.as_ref().map(|_| index_weights),
        };
        if let (Some(share), Some(communicator)) = (share, *communicator)
            && normed.is_own()
        {
            let rounds = ops::project_rounds(exec, &normed.exact, &projections, &out)?;
            normed.gather(exec, communicator, share.rows, rounds)?;
        }
        ops::project(exec, &normed.exact, normed.rounded(), projections, &mut out)
    }

    /// Runs the ops after the first GEMMs: the low rank of queries, keys, and the entries that the step completes.
    pub(super) fn latents(
        &mut self,
        weights: &Attention,
        kind: LayerKind,
        state: &mut LayerState,
    ) -> Result<(), OpError> {
        let (config, numerics) = (self.config, self.numerics);
        let Self { exec, rotations, inputs, work, .. } = self;
        let Workspace { qr_raw, qr, kv_raw, kv, sparse, heavy, index, .. } = &mut **work;
        let pair = if kind == LayerKind::Sparse { sparse } else { heavy };
        let (indexer, spec) = (&weights.indexer, |index| compressor_spec(config, kind, index, numerics));
        let entries = [
            new_entries(spec(false), weights.compressor.as_ref(), pair, &mut state.compressed),
            new_entries(spec(true), indexer.as_ref().map(|indexer| &indexer.compressor), index, &mut state.index),
        ];
        let latents = Latents {
            queries: (qr_raw, &weights.q_norm),
            keys: (kv_raw, &weights.kv_norm),
            table: rotations.of(kind),
            eps: config.rms_norm_eps,
            quantize: numerics.quantize_kv,
        };
        let (queries, rounded) = qr.outputs();
        ops::attention_latents(exec, latents, &inputs.batch(), LatentOutputs { queries, rounded, keys: kv, entries })
    }

    /// Computes the queries of attention and of the indexer, and writes the compressors' state.
    pub(super) fn queries(
        &mut self,
        weights: &Attention,
        kind: LayerKind,
        state: &mut LayerState,
    ) -> Result<(), OpError> {
        let (config, numerics) = (self.config, self.numerics);
        let Self { exec, rotations, inputs, work, .. } = self;
        let Workspace { qr, q, index_q, sparse, heavy, index, .. } = &mut **work;
        let pair = if kind == LayerKind::Sparse { sparse } else { heavy };
        if let Some(indexer) = &weights.indexer {
            let (x, tokens) = (qr.input(&indexer.wq_b), index_q.shape()[0]);
            ops::on_side_stream(exec, tokens, 0, |exec| ops::matmul(exec, x, &indexer.wq_b, index_q))?;
        }
        ops::matmul(exec, qr.input(&weights.wq_b), &weights.wq_b, q)?;
        exec.join_side_streams()?;
        let spec = |index| compressor_spec(config, kind, index, numerics);
        let of_index = weights.indexer.as_ref().map(|indexer| &indexer.compressor);
        let kept = [
            kept_tokens(spec(false), weights.compressor.as_ref(), pair, &mut state.compressed),
            kept_tokens(spec(true), of_index, index, &mut state.index),
        ];
        let queries = Queries { heads: q, index: weights.indexer.is_some().then_some(index_q), kept };
        let precision = (config.rms_norm_eps, numerics.quantize_kv);
        ops::attention_queries(exec, queries, rotations.of(kind), &inputs.batch(), precision)
    }

    /// The entries that each token attends to.
    fn choose(&mut self, index: &Compressed, kind: LayerKind) -> Result<(), OpError> {
        let spec = self.select_spec(kind);
        let Self { exec, inputs, work, .. } = self;
        // Constant positive factors of the scores, head_dim^-1/2 and heads^-1/2, do not change the choice.
        let (entries, share) = (&index.entries, spec.share);
        let Workspace { index_q: q, index_weights: weights, chosen, chosen_part, .. } = &mut **work;
        let (tokens, topk, batch) = (q.shape()[0], chosen.rows_cols().1, inputs.batch());
        let part = chosen_part.as_mut().filter(|_| share != TokenShare::ALL);
        let (Some(part), Some(communicator)) = (part, self.communicator) else {
            return ops::select_entries(exec, q, weights, entries, spec, &batch, chosen);
        };
        part.set_rows(share.rows(tokens));
        ops::select_entries(exec, q, weights, entries, spec, &batch, part)?;
        // The blocks of all ranks are gathered as rows of words.
        let (blocks, width) = (share.rows(tokens) / TokenShare::BLOCK, TokenShare::BLOCK * topk);
        part.as_shape(&[blocks, width], DType::F32, |part| {
            chosen.as_shape(&[blocks, share.ranks * width], DType::F32, |whole| {
                communicator.all_gather(exec, part, whole)
            })
        })
    }

    /// Tokens for which this rank selects entries, and number of entries; the same on all ranks.
    fn select_spec(&self, kind: LayerKind) -> SelectSpec {
        let (ratio, shard) = (kind.ratio().unwrap_or(1), self.shard);
        if !is_prompt_step(self.step) {
            // A graph is for contexts of any length.
            let pages = self.inputs.common.block_tables().rows_cols().1;
            return SelectSpec { ratio, share: TokenShare::ALL, pages };
        }
        let pages = self.step.max_blocks();
        let pays = self.step.tokens.len() * (pages * PAGE_TOKENS / ratio) >= self.sharing.scores;
        let share = if pays { TokenShare { rank: shard.rank, ranks: shard.ranks } } else { TokenShare::ALL };
        SelectSpec { ratio, share, pages }
    }

    /// Projects `attended`; writes `output`, summed over the ranks. `is_split`: `attended` is also packed.
    pub(super) fn project_output(&mut self, weights: &Attention, is_split: bool) -> Result<(), OpError> {
        let (shared, owner) = (self.is_shared(), self.shard.owns_heads(self.config));
        let Self { exec, numerics, work, .. } = self;
        let packed = work.attended_split.as_ref().filter(|_| is_split);
        let attended = Activation { values: &work.attended, packed };
        let wo_a = match &weights.wo_a_bf16 {
            Some(wide) if ops::widens(exec, &work.attended, &weights.wo_a, &work.z)? => wide,
            _ => &weights.wo_a,
        };
        ops::grouped_matmul(exec, attended, wo_a, &mut work.z)?;
        match numerics.quantize_activations && weights.wo_b.is_quantized() {
            true => ops::matmul_dynamic(exec, &mut work.z, &weights.wo_b, &mut work.output)?,
            false => ops::matmul(exec, &work.z, &weights.wo_b, &mut work.output)?,
        }
        if shared && !owner {
            // Another rank has the same heads.
            exec.clear(&mut work.output)?;
        }
        self.sum_over_ranks()
    }
}

/// A compressor's new entries in the step; `None` if the layer has no compressor.
fn new_entries<'a>(
    spec: Option<CompressorSpec>,
    compressor: Option<&'a Compressor>,
    pair: &'a Pair,
    state: &'a mut Option<Compressed>,
) -> Option<NewEntries<'a>> {
    let (spec, weights, Compressed { entries, partial }) = (spec?, &compressor?.pooling, state.as_mut()?);
    let rings = [&partial.values, &partial.scores];
    Some(NewEntries { tokens: (&pair.values, &pair.scores), weights, spec, rings, entries })
}

/// A compressor's kept tokens in the step; `None` if the layer has no compressor.
fn kept_tokens<'a>(
    spec: Option<CompressorSpec>,
    compressor: Option<&'a Compressor>,
    pair: &'a Pair,
    state: &'a mut Option<Compressed>,
) -> Option<KeptTokens<'a>> {
    let (spec, weights, Compressed { partial, .. }) = (spec?, &compressor?.pooling, state.as_mut()?);
    Some(KeptTokens { tokens: (&pair.values, &pair.scores), weights, spec, state: partial })
}
