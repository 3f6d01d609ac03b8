//! Activations of a step, allocated once for the largest step.

use crate::config::{Drafts, LayerKind, STREAMS};
use crate::draft_workspace::DraftWorkspace;
use crate::dspark_workspace::DSparkWorkspace;
use crate::normed::Normed;
use crate::plan::PAGE_TOKENS;
use crate::rank_config::{Options, RankConfig};
use crate::shard::RankParts;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, Tensor};
use pegainfer_kernels::ops::deepseek_v4::{SPLIT_TOKENS, TokenShare, split_bytes, takes_packed_rows};
use pegainfer_runtime::{Bounds, ChosenExperts};
use std::ops::Range;

/// Results of the GEMMs with a compressor's two matrices, `[tokens, width]` f32.
#[derive(Debug)]
pub(crate) struct Pair {
    pub values: Tensor,
    pub scores: Tensor,
}

impl Pair {
    /// A workspace for `tokens` tokens of layers of this kind, with entries of `dim` elements.
    fn new(exec: &mut Exec, tokens: usize, kind: LayerKind, dim: usize) -> std::io::Result<Self> {
        let width = if kind == LayerKind::Sparse { 2 * dim } else { dim };
        let mut tensor = |name: &str| exec.tensor(name, &[tokens, width], DType::F32);
        Ok(Self { values: tensor("compressor.values")?, scores: tensor("compressor.scores")? })
    }

    /// The outputs of the compressor's GEMMs: values, then scores.
    pub fn both(&mut self) -> [&mut Tensor; 2] {
        [&mut self.values, &mut self.scores]
    }
}

/// Activations, allocated once for the largest step. Heads and groups are the rank's.
#[derive(Debug)]
pub struct Workspace {
    /// `[tokens, hidden]`.
    pub(crate) embedded: Tensor,
    /// The residual streams, `[tokens, 4, hidden]`.
    pub(crate) streams: Tensor,
    /// Input of a block before its norm, `[tokens, hidden]`.
    pub(crate) mixed: Tensor,
    /// Normalised, `[tokens, hidden]`.
    pub(crate) normed: Normed,
    /// Weights of the block's output in each stream, `[tokens, 4]` f32.
    pub(crate) post: Tensor,
    /// Mixing matrix of the streams, `[tokens, 4, 4]` f32.
    pub(crate) comb: Tensor,
    /// Output of a block, `[tokens, hidden]`; with several ranks, this rank's part and then the sum over all.
    pub(crate) output: Tensor,
    /// Output of the shared expert if separate kernels compute it, `[tokens, hidden]`.
    pub(crate) shared: Tensor,
    /// `[tokens, q_lora]`, before its norm.
    pub(crate) qr_raw: Tensor,
    /// `[tokens, q_lora]`.
    pub(crate) qr: Normed,
    /// `[tokens, heads, head_dim]`.
    pub(crate) q: Tensor,
    /// `[tokens, head_dim]`, before its norm.
    pub(crate) kv_raw: Tensor,
    /// `[tokens, 1, head_dim]`.
    pub(crate) kv: Tensor,
    /// Activations of sparse layers, heavy layers and the indexer.
    pub(crate) sparse: Pair,
    pub(crate) heavy: Pair,
    pub(crate) index: Pair,
    /// `[tokens, index_heads, index_head_dim]`.
    pub(crate) index_q: Tensor,
    /// `[tokens, index_heads]`.
    pub(crate) index_weights: Tensor,
    /// `[tokens, index_topk]` u32.
    pub(crate) chosen: Tensor,
    /// Entries chosen for the rank's own tokens, if ranks share them; `None` with one rank.
    pub(crate) chosen_part: Option<Tensor>,
    /// `[tokens, heads, head_dim]`.
    pub(crate) attended: Tensor,
    /// `attended` in the split form that the output projection takes for few tokens (`split_bytes`), `[tokens, ..]` u8;
    /// `None` if no kernel of the device takes it.
    pub(crate) attended_split: Option<Tensor>,
    /// `[tokens, groups * o_lora]`.
    pub(crate) z: Tensor,
    /// `[tokens, experts]` f32.
    pub(crate) router_logits: Tensor,
    /// `[tokens, k]` u32 for each layer.
    pub(crate) experts: ChosenExperts,
    /// `[tokens, k]` f32.
    pub(crate) expert_weights: Tensor,
    /// Streams of the sampled tokens, `[samples, 4, hidden]`.
    pub(crate) last_streams: Tensor,
    /// `[samples, hidden]`.
    pub(crate) last: Tensor,
    /// Normalised, `[samples, hidden]`.
    pub(crate) last_normed: Tensor,
    /// Workspace of the layer for multi-token prediction; `None` if it is not loaded.
    pub(crate) draft: Option<DraftWorkspace>,
    /// Workspace of DSpark's stages; `None` if they are not loaded.
    pub(crate) dspark: Option<DSparkWorkspace>,
}

impl Workspace {
    /// A workspace of a rank with these numbers.
    pub fn new(exec: &mut Exec, rank: &RankConfig, bounds: &Bounds) -> std::io::Result<Self> {
        let RankConfig { model: config, options: Options { numerics, .. }, shard, .. } = rank;
        let (numerics, shard) = (*numerics, *shard);
        let (t, hidden, dim) = (bounds.size.tokens, config.hidden_size, config.head_dim);
        let equal = shard.tokens(t).rows; // an equal share for each rank
        let (heads, samples) = (shard.heads(config).len(), bounds.size.samples);
        let packs = takes_packed_rows(exec, numerics.activations, dim).map_err(std::io::Error::other)?;
        let mut normed =
            |name, width| Normed::new(exec, name, (equal, width), numerics.activations, numerics.quantize_activations);
        let (normed, qr) = (normed("normed", hidden)?, normed("qr", config.q_lora_rank)?);
        let act = numerics.activations;
        let mut pair = |kind, dim| Pair::new(exec, t, kind, dim);
        let (sparse, heavy) = (pair(LayerKind::Sparse, dim)?, pair(LayerKind::Heavy, dim)?);
        let index = pair(LayerKind::Sparse, config.index_head_dim)?;
        let has_mtp = config.loads_drafts && matches!(config.drafts, Drafts::Mtp { .. });
        let draft = has_mtp.then(|| DraftWorkspace::new(exec, config, numerics, t)).transpose()?;
        let stages = |numbers| DSparkWorkspace::new(exec, config, numbers, numerics, bounds);
        let dspark = config.loaded_dspark().map(stages).transpose()?;
        // A block's keys are read as whole pages.
        let kv_rows = if dspark.is_some() { t.next_multiple_of(PAGE_TOKENS) } else { t };
        let experts = ChosenExperts::new(exec, config.layers.len(), t, config.experts_per_token)?;
        let mut tensor = |name: &str, shape: &[usize], dtype| exec.tensor(name, shape, dtype);
        let topk = config.index_topk;
        let own_tokens = TokenShare { rank: shard.rank, ranks: shard.ranks }.rows(t);
        let chosen_part = || tensor("chosen_part", &[own_tokens, topk], DType::U32);
        let chosen_part = (shard.ranks > 1).then(chosen_part).transpose()?;
        let (groups, columns) = (shard.groups(config).len(), heads * dim / shard.groups(config).len());
        let split_rows = t.min(SPLIT_TOKENS);
        let attended_split = || tensor("attended.split", &[split_rows, split_bytes(groups, columns)], DType::U8);
        let attended_split = packs.then(attended_split).transpose()?;
        Ok(Self {
            embedded: tensor("embedded", &[t, hidden], act)?,
            streams: tensor("streams", &[equal, STREAMS, hidden], act)?,
            mixed: tensor("mixed", &[t, hidden], act)?,
            normed,
            post: tensor("post", &[t, STREAMS], DType::F32)?,
            comb: tensor("comb", &[t, STREAMS, STREAMS], DType::F32)?,
            output: tensor("output", &[equal, hidden], act)?,
            shared: tensor("shared", &[t, hidden], act)?,
            qr_raw: tensor("qr_raw", &[t, config.q_lora_rank], act)?,
            qr,
            q: tensor("q", &[t, heads, dim], act)?,
            kv_raw: tensor("kv_raw", &[t, dim], act)?,
            kv: tensor("kv", &[kv_rows, 1, dim], act)?,
            sparse,
            heavy,
            index,
            index_q: tensor("index_q", &[t, config.index_heads, config.index_head_dim], act)?,
            index_weights: tensor("index_weights", &[t, config.index_heads], act)?,
            // The parts of all ranks.
            chosen: tensor("chosen", &[own_tokens * shard.ranks, topk], DType::U32)?,
            chosen_part,
            attended_split,
            attended: tensor("attended", &[t, heads, dim], act)?,
            z: tensor("z", &[t, shard.groups(config).len() * config.o_lora_rank], act)?,
            router_logits: tensor("logits", &[t, config.experts], DType::F32)?,
            experts,
            expert_weights: tensor("expert_weights", &[t, config.experts_per_token], DType::F32)?,
            last_streams: tensor("last_streams", &[samples, STREAMS, hidden], act)?,
            last: tensor("last", &[samples, hidden], act)?,
            last_normed: tensor("last_normed", &[samples, hidden], act)?,
            draft,
            dspark,
        })
    }

    /// Sets the tensors of the residual streams, and of the block's output added to them, to the rows of these tokens.
    pub fn set_residual_range(&mut self, tokens: Range<usize>) {
        let Self { output, streams, post, comb, mixed, .. } = self;
        for tensor in [output, streams, post, comb, mixed] {
            tensor.set_range(tokens.start, tokens.len());
        }
    }

    /// Gives every activation the rows of a step of `tokens` tokens.
    pub fn set_rows(&mut self, tokens: usize) {
        let Self { embedded, streams, mixed, post, comb, output, shared, .. } = self;
        for tensor in [embedded, streams, mixed, post, comb, output, shared] {
            tensor.set_rows(tokens);
        }
        let Self { qr_raw, q, kv_raw, kv, index_q, index_weights, chosen, attended, z, .. } = self;
        for tensor in [qr_raw, q, kv_raw, kv, index_q, index_weights, chosen, attended, z] {
            tensor.set_rows(tokens);
        }
        if let Some(DraftWorkspace { add, keep, .. }) = &mut self.draft {
            add.set_rows(tokens);
            keep.set_rows(tokens);
        }
        if let Some(DSparkWorkspace { main, .. }) = &mut self.dspark {
            main.set_rows(tokens);
        }
        for normed in [&mut self.normed, &mut self.qr] {
            normed.set_rows(tokens);
        }
        let Self { sparse, heavy, index, router_logits, expert_weights, .. } = self;
        for tensor in [sparse, heavy, index].into_iter().flat_map(|pair| [&mut pair.values, &mut pair.scores]) {
            tensor.set_rows(tokens);
        }
        for tensor in [router_logits, expert_weights] {
            tensor.set_rows(tokens);
        }
    }
}
