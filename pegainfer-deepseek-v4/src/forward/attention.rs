//! Attention of one layer: window, compressed entries, and the projections around them.

use super::Pass;
use crate::config::LayerKind;
use crate::graph_shape::is_of_prompts;
use crate::state::{Compressed, LayerState, compressor_spec};
use crate::weights::{Attention, Compressor, Indexer};
use crate::workspace::{Pair, Workspace};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError};
use pegainfer_kernels::ops::deepseek_v4::{
    self as ops, Batch, CompressorSpec, PAGE_TOKENS, Projected, Projections, RopeTable, SelectSpec, TokenShare, Visible,
};

impl Pass<'_> {
    /// Attention over `normed`: writes `output`, or `partial` if there are several ranks. The state is read before it is written: a
    /// chunk may replace all of a window.
    pub(super) fn attention(
        &mut self,
        weights: &Attention,
        kind: LayerKind,
        state: &mut LayerState,
    ) -> Result<(), OpError> {
        self.project_input(weights, kind)?;
        self.queries_and_keys(weights, kind)?;
        self.compress(weights, kind, state)?;
        if let (Some(indexer), Some(index)) = (&weights.indexer, &state.index) {
            self.choose(indexer, index, kind)?;
        }
        let Self { exec, rotations, inputs, work, .. } = self;
        let batch = inputs.batch();
        let visible = match (&state.compressed, kind.ratio()) {
            (Some(Compressed { entries, .. }), _) if kind == LayerKind::Sparse => {
                Visible::Chosen { entries, chosen: &work.chosen }
            }
            (Some(Compressed { entries, .. }), Some(ratio)) => Visible::All { entries, ratio },
            _ => Visible::Nothing,
        };
        let keys = (&work.kv, &state.window);
        ops::sparse_attention(exec, &work.q, keys, visible, &weights.sink, &batch, &mut work.attended)?;
        ops::write_ring(exec, &work.kv, &batch, &mut state.window)?;
        // Keys are values, so the output is rotated, too; back by the query's position only distances are left.
        let table = rotations.of(kind);
        ops::rope(exec, &mut work.attended, &inputs.common.positions, table, true)?;
        self.project_output(weights)
    }

    /// The GEMMs of `normed`: inputs of the norms of queries and keys, of the compressors and of the indexer.
    fn project_input(&mut self, weights: &Attention, kind: LayerKind) -> Result<(), OpError> {
        let Self { exec, work, .. } = self;
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
        ops::project(exec, &normed.exact, normed.rounded(), projections, &mut out)
    }

    fn queries_and_keys(&mut self, weights: &Attention, kind: LayerKind) -> Result<(), OpError> {
        let Self { exec, config, numerics, rotations, inputs, work, .. } = self;
        let eps = config.rms_norm_eps;
        let table = rotations.of(kind);
        work.qr.norm(exec, &work.qr_raw, &weights.q_norm, eps)?;
        ops::matmul(exec, work.qr.input(&weights.wq_b), &weights.wq_b, &mut work.q)?;
        let at = (&inputs.common.positions, table);
        ops::norm_rope_q(exec, &mut work.q, at, eps)?;
        let (keys, quantize) = ((&work.kv_raw, &weights.kv_norm), numerics.quantize_kv);
        ops::norm_rope_kv(exec, keys, at, eps, quantize, &mut work.kv)
    }

    /// New entries of the layer and of its indexer.
    fn compress(&mut self, weights: &Attention, kind: LayerKind, state: &mut LayerState) -> Result<(), OpError> {
        let (config, numerics) = (self.config, self.numerics);
        let Self { exec, rotations, inputs, work, .. } = self;
        let (table, batch) = (&rotations.compressed, inputs.batch());
        let main = compressor_spec(config, kind, false, numerics);
        if let (Some(spec), Some(compressor), Some(state)) = (main, &weights.compressor, &mut state.compressed) {
            let pair = if kind == LayerKind::Sparse { &mut work.sparse } else { &mut work.heavy };
            pool(exec, compressor, pair, table, spec, &batch, state)?;
        }
        let index = compressor_spec(config, kind, true, numerics);
        if let (Some(spec), Some(indexer), Some(state)) = (index, &weights.indexer, &mut state.index) {
            pool(exec, &indexer.compressor, &mut work.index, table, spec, &batch, state)?;
        }
        Ok(())
    }

    /// The entries that each token attends to.
    fn choose(&mut self, indexer: &Indexer, index: &Compressed, kind: LayerKind) -> Result<(), OpError> {
        let spec = self.select_spec(kind);
        let Self { exec, numerics, rotations, inputs, work, .. } = self;
        let table = rotations.of(kind);
        ops::matmul(exec, work.qr.input(&indexer.wq_b), &indexer.wq_b, &mut work.index_q)?;
        ops::rope(exec, &mut work.index_q, &inputs.common.positions, table, false)?;
        ops::quantize_index(exec, &mut work.index_q, numerics.quantize_kv)?;
        // Constant positive factors of the scores, head_dim^-1/2 and heads^-1/2, do not change the choice.
        let (entries, share) = (&index.entries, spec.share);
        let Workspace { index_q: q, index_weights: weights, chosen, chosen_part, .. } = &mut **work;
        let (tokens, topk, batch) = (q.shape()[0], chosen.rows_cols().1, inputs.batch());
        let part = chosen_part.as_mut().filter(|_| share != TokenShare::ALL);
        let Some(part) = part else {
            return ops::select_entries(exec, q, weights, entries, spec, &batch, chosen);
        };
        part.set_rows(share.rows(tokens));
        ops::select_entries(exec, q, weights, entries, spec, &batch, part)?;
        // Blocks of all ranks in turn are rows of words, whatever these mean.
        let (blocks, width) = (share.rows(tokens) / TokenShare::BLOCK, TokenShare::BLOCK * topk);
        part.as_shape(&[blocks, width], DType::F32, |part| {
            chosen.as_shape(&[blocks, share.ranks * width], DType::F32, |whole| {
                self.communicator.all_gather(exec, part, whole)
            })
        })
    }

    /// Which entries this rank chooses from for which tokens; the same decision on all ranks.
    fn select_spec(&self, kind: LayerKind) -> SelectSpec {
        let (ratio, shard) = (kind.ratio().unwrap_or(1), self.shard);
        if !is_of_prompts(self.step) {
            // A graph is for contexts of any length.
            let pages = self.inputs.common.block_tables.rows_cols().1;
            return SelectSpec { ratio, share: TokenShare::ALL, pages };
        }
        let pages = self.step.max_blocks;
        let pays = self.step.tokens.len() * (pages * PAGE_TOKENS / ratio) >= self.shared_scores;
        let share = if pays { TokenShare { rank: shard.rank, ranks: shard.ranks } } else { TokenShare::ALL };
        SelectSpec { ratio, share, pages }
    }

    /// Projects `attended`: writes `output`, or if there are several ranks `partial`, summed over them.
    fn project_output(&mut self, weights: &Attention) -> Result<(), OpError> {
        let (shared, owner) = (self.is_shared(), self.shard.owns_heads(self.config));
        let Self { exec, numerics, work, .. } = self;
        ops::grouped_matmul(exec, &work.attended, &weights.wo_a, &mut work.z)?;
        let out = if shared { &mut work.partial } else { &mut work.output };
        match numerics.quantize_activations && weights.wo_b.is_quantized() {
            true => ops::matmul_dynamic(exec, &mut work.z, &weights.wo_b, out)?,
            false => ops::matmul(exec, &work.z, &weights.wo_b, out)?,
        }
        if !shared {
            return Ok(());
        }
        if !owner {
            // Another rank has the same heads.
            exec.clear(&mut work.partial)?;
        }
        self.communicator.all_reduce(exec, &mut work.partial)
    }
}

/// Runs one compressor over the tokens of the step, whose values and scores are in `pair`.
fn pool(
    exec: &mut Exec,
    compressor: &Compressor,
    pair: &mut Pair,
    table: &RopeTable,
    spec: CompressorSpec,
    batch: &Batch<'_>,
    state: &mut Compressed,
) -> Result<(), OpError> {
    let tokens = (&pair.values, &mut pair.scores);
    ops::compress(exec, tokens, (&compressor.pooling, table), spec, batch, &mut state.partial, &mut state.entries)
}
