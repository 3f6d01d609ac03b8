//! DSpark (DeepSeek's DeepSpec; checkpoint 0731 of DeepSeek-V4-Flash): blocks of drafts by three stages.
//!
//! For every token that the model computes, the means of its four streams after the target layers give the keys of each
//! stage: `x = norm(main_proj · [mean of X after each target layer])`, `key = rope(norm(wkv · x))`, stored in the
//! stage's ring. Nothing else of the stage runs then.
//!
//! A block follows an anchor, the newest accepted token, at position `p`. It has the positions `p + 1` to `p + K`: the
//! first with the token sampled there, the others with a noise token. Each stage is a window layer in which all
//! positions attend to the same keys: those of the ring at `p - 127` to `p`, and those of all `K` positions of the
//! block, which no ring keeps.
//!
//! After the last stage, a separate mixing of streams and norm, and the model's output matrix, give logits of each
//! position. Then, one position after the other, `logits += markov_w2 · markov_w1[previous token]`, and the most likely
//! token is the draft.

use super::Pass;
use crate::config::LayerKind;
use crate::dspark_workspace::DSparkWorkspace;
use crate::plan::PAGE_TOKENS;
use crate::state::LayerState;
use crate::weights::{Attention, Weights};
use crate::workspace::Workspace;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_kernels::ops::deepseek_v4::{self as ops, LatentOutputs, Latents, RaggedBatch, Visible};

impl Pass<'_> {
    /// Keeps the means of the streams after layer `layer` if it is a target layer of loaded stages.
    pub(super) fn keep_target(&mut self, layer: usize) -> Result<(), OpError> {
        let Some(numbers) = self.config.loaded_dspark() else { return Ok(()) };
        // The last layer has those of all tokens anyway.
        if numbers.targets.contains(&layer) && layer + 1 < self.config.layers.len() {
            self.gather_streams()?;
        }
        let Self { exec, work, .. } = self;
        let Workspace { streams, dspark: Some(dspark), .. } = &mut **work else { return Ok(()) };
        let parts = (0..).zip(&numbers.targets).filter(|(_, target)| **target == layer);
        parts.map(|(part, _)| part).try_for_each(|part| ops::mean_streams(exec, streams, part, &mut dspark.main))
    }

    /// Writes the keys of all tokens of the step to the stages' rings; nothing if the stages are not loaded.
    pub(super) fn fill_rings(&mut self, state: &mut [LayerState]) -> Result<(), OpError> {
        let Some(dspark) = &self.weights.dspark else { return Ok(()) };
        let (eps, numerics) = (self.config.rms_norm_eps, self.numerics);
        let Self { exec, rotations, inputs, work, .. } = self;
        let Workspace { mixed, normed, qr_raw, qr, kv_raw, kv, dspark: Some(own), .. } = &mut **work else {
            return Err(not_loaded());
        };
        let projection = &dspark.main_projection;
        match numerics.quantize_activations && projection.is_quantized() {
            true => ops::matmul_dynamic(exec, &mut own.main, projection, mixed)?,
            false => ops::matmul(exec, &own.main, projection, mixed)?,
        }
        normed.norm(exec, mixed, &dspark.main_norm, eps)?;
        let (table, batch, quantize) = (rotations.of(LayerKind::Window), inputs.batch(), numerics.quantize_kv);
        for (stage, state) in dspark.stages.iter().zip(state) {
            let Attention { wkv, kv_norm, q_norm, .. } = &stage.attn;
            ops::matmul(exec, normed.input(wkv), wkv, kv_raw)?;
            // The op also norms queries; they are not used.
            let latents = Latents { queries: (qr_raw, q_norm), keys: (kv_raw, kv_norm), table, eps, quantize };
            let (queries, rounded) = qr.outputs();
            let outputs = LatentOutputs { queries, rounded, keys: kv, entries: [None, None] };
            ops::attention_latents(exec, latents, &batch, outputs)?;
            ops::write_ring(exec, kv, &batch, &mut state.window)?;
        }
        Ok(())
    }

    /// A pass of the stages over blocks, up to `last_normed`. Changes no state.
    pub fn draft_blocks(&mut self, state: &mut [LayerState]) -> Result<(), OpError> {
        let Some(dspark) = &self.weights.dspark else { return Err(not_loaded()) };
        self.embed()?;
        ops::expand_streams(self.exec, &self.work.embedded, &mut self.work.streams)?;
        for (i, (stage, state)) in dspark.stages.iter().zip(state).enumerate() {
            self.enter_layer(stage, i == 0)?;
            self.block_attention(&stage.attn, state)?;
            self.enter(&stage.ffn_hyper, &stage.ffn_norm)?;
            self.experts(&stage.moe, self.draft_number())?;
        }
        self.leave()?;
        self.sampled_rows(&dspark.head_hyper, &dspark.norm)
    }

    /// Attention over `normed` within blocks and to the rings: writes `output`.
    fn block_attention(&mut self, weights: &Attention, state: &mut LayerState) -> Result<(), OpError> {
        let kind = LayerKind::Window;
        self.project_input(weights, kind)?;
        self.latents(weights, kind, state)?;
        self.queries(weights, kind, state)?;
        let Self { exec, config, rotations, inputs, work, .. } = self;
        let Workspace { q, kv, attended, dspark: Some(dspark), .. } = &mut **work else { return Err(not_loaded()) };
        let DSparkWorkspace { anchor_positions, anchor_rows, anchor_keys, distances, block, page_tables, .. } = dspark;
        let (dim, tokens, dtype) = (config.head_dim, q.shape()[0], kv.dtype());
        state.window.as_rows_of(dim, |keys| ops::pick_rows(exec, keys, anchor_rows, anchor_keys))?;
        // For the op, every token of a block is at the anchor's position, with the ring as its window and the anchor's
        // key as that of this pass. The keys of the block are entries of one token each; as many are visible as there
        // are tokens up to the anchor. The op writes the anchor's key to where it already is, and rotates back by the
        // anchor's position.
        let batch = RaggedBatch { positions: anchor_positions, page_tables, ..inputs.batch() };
        let pages = [tokens.div_ceil(PAGE_TOKENS), PAGE_TOKENS, dim];
        kv.as_shape(&pages, dtype, |entries| {
            let visible = Visible::Chosen { entries, chosen: block };
            let (keys, sink) = ((&*anchor_keys, &mut state.window), (&weights.sink, rotations.of(kind)));
            ops::sparse_attention(exec, q, keys, visible, sink, &batch, (attended, None))
        })?;
        ops::rope(exec, attended, distances, rotations.of(kind), true)?;
        self.project_output(weights, false)
    }
}

/// Adds the part of the Markov head that depends on the previous token to the logits of one position of each block; see
/// [`Model::add_transition`](pegainfer_runtime::Model::add_transition).
pub(crate) fn add_transition(
    exec: &mut Exec,
    (work, weights): (&mut Workspace, &Weights),
    previous: Option<&Tensor>,
    logits: &mut Tensor,
) -> Result<(), OpError> {
    let (Some(weights), Some(work)) = (&weights.dspark, &mut work.dspark) else { return Err(not_loaded()) };
    let DSparkWorkspace { first_tokens, markov, transition, .. } = work;
    ops::embed(exec, previous.unwrap_or(first_tokens), &weights.markov_embedding, 0, markov)?;
    ops::matmul(exec, &*markov, &weights.markov_output, transition)?;
    ops::add(exec, transition, logits)
}

fn not_loaded() -> OpError {
    OpError { op: "draft", message: "the stages that draft are not loaded".to_owned() }
}
