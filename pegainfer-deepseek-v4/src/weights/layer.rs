//! The weights of a decoder layer.

use super::formats::Formats;
use super::tensor_part::TensorPart;
use crate::config::{Config, LayerKind, STREAMS};
use crate::shard::RankParts;
use pegainfer_core::parallel::Shard;
use pegainfer_core::tensor::Tensor;
use pegainfer_core::weights::{StoredDtype as Dtype, WeightsError};
use pegainfer_kernels::ops::Matrix;
use pegainfer_kernels::ops::deepseek_v4::{CompressorWeights, Experts, HyperWeights};

/// A decoder layer.
#[derive(Debug)]
pub struct Layer {
    /// Mixing around attention.
    pub attn_hyper: HyperWeights,
    /// `[hidden]` bf16.
    pub attn_norm: Tensor,
    /// The rank's heads.
    pub attn: Attention,
    /// Mixing around the experts.
    pub ffn_hyper: HyperWeights,
    /// `[hidden]` bf16.
    pub ffn_norm: Tensor,
    /// The rank's experts.
    pub moe: Moe,
}

/// Attention of a layer; `heads` and `groups` are the rank's.
#[derive(Debug)]
pub struct Attention {
    /// `[q_lora, hidden]`.
    pub wq_a: Matrix,
    /// `[q_lora]` bf16.
    pub q_norm: Tensor,
    /// `[heads * head_dim, q_lora]`.
    pub wq_b: Matrix,
    /// `[head_dim, hidden]`.
    pub wkv: Matrix,
    /// `[head_dim]` bf16.
    pub kv_norm: Tensor,
    /// `[heads]` f32.
    pub sink: Tensor,
    /// `[groups * o_lora, heads per group * head_dim]`.
    pub wo_a: Matrix,
    /// `wo_a` in bf16, for GEMMs of many tokens; `None` if none takes it in bf16. See
    /// [`Weights::widen`](super::Weights::widen).
    pub wo_a_bf16: Option<Matrix>,
    /// `[hidden, groups * o_lora]`.
    pub wo_b: Matrix,
    /// Compressor of sparse and heavy layers.
    pub compressor: Option<Compressor>,
    /// Indexer of sparse layers.
    pub indexer: Option<Indexer>,
}

/// A compressor; `width` is twice the entries' in sparse layers.
#[derive(Debug)]
pub struct Compressor {
    /// `[width, hidden]`.
    pub wkv: Matrix,
    /// `[width, hidden]`.
    pub wgate: Matrix,
    /// Weights in the form that the op takes.
    pub pooling: CompressorWeights,
}

impl Compressor {
    /// The weights of its two GEMMs: that of the values, then that of the scores.
    pub fn matrices(&self) -> [&Matrix; 2] {
        [&self.wkv, &self.wgate]
    }
}

/// The indexer of a sparse layer, whole on every rank.
#[derive(Debug)]
pub struct Indexer {
    /// `[index_heads * index_head_dim, q_lora]`.
    pub wq_b: Matrix,
    /// `[index_heads, hidden]`.
    pub weights_proj: Matrix,
    /// The compressor of the keys that it scores.
    pub compressor: Compressor,
}

/// Assigns tokens to experts.
#[derive(Debug)]
pub enum Router {
    /// By token id: `[vocab, k]` u32.
    Hash(Tensor),
    /// By a gate with this bias: `[experts]` f32.
    Learned(Tensor),
}

/// The experts of a layer.
#[derive(Debug)]
pub struct Moe {
    /// Gate of all experts, `[experts, hidden]`.
    pub gate: Matrix,
    /// Assigns tokens to experts.
    pub router: Router,
    /// The rank's columns of the rank's experts.
    pub experts: Experts,
    /// Number of this rank's first expert.
    pub first: usize,
    /// The rank's columns.
    pub shared: Experts,
}

/// Reads a layer of this kind with this tensor name `prefix`. `hash`: its experts are chosen by the token id alone.
pub(super) fn layer(
    formats: &mut Formats<'_, '_>,
    config: &Config,
    shard: Shard,
    prefix: &str,
    (kind, hash): (LayerKind, bool),
) -> Result<Layer, WeightsError> {
    let hidden = config.hidden_size;
    let mixes = 2 * STREAMS + STREAMS * STREAMS;
    let name = |tail: &str| format!("{prefix}{tail}");
    Ok(Layer {
        attn_hyper: hyper(formats, &name("hc_attn"), mixes, 3, hidden)?,
        attn_norm: formats.vector(&name("attn_norm.weight"), hidden)?,
        attn: attention(formats, config, shard, &name("attn."), kind)?,
        ffn_hyper: hyper(formats, &name("hc_ffn"), mixes, 3, hidden)?,
        ffn_norm: formats.vector(&name("ffn_norm.weight"), hidden)?,
        moe: moe(formats, config, shard, &name("ffn."), hash)?,
    })
}

/// Reads a mixing of streams, of `mixes` values with `scales` scales, with this tensor name `prefix`.
pub(super) fn hyper(
    formats: &mut Formats<'_, '_>,
    prefix: &str,
    mixes: usize,
    scales: usize,
    hidden: usize,
) -> Result<HyperWeights, WeightsError> {
    let mut f32 =
        |tail: &str, shape: &[usize]| formats.plain(&format!("{prefix}_{tail}"), Dtype::F32, shape, &TensorPart::ALL);
    let function = f32("fn", &[mixes, STREAMS * hidden])?;
    Ok(HyperWeights { function, base: f32("base", &[mixes])?, scale: f32("scale", &[scales])? })
}

fn attention(
    formats: &mut Formats<'_, '_>,
    config: &Config,
    shard: Shard,
    prefix: &str,
    kind: LayerKind,
) -> Result<Attention, WeightsError> {
    let (hidden, rank, dim) = (config.hidden_size, config.q_lora_rank, config.head_dim);
    let (heads, groups) = (shard.heads(config), shard.groups(config));
    let z = groups.start * config.o_lora_rank..groups.end * config.o_lora_rank;
    let group_rows = TensorPart { rows: Some(z.clone()), columns: None };
    let group_columns = TensorPart { rows: None, columns: Some(z) };
    let head_rows = TensorPart { rows: Some(heads.start * dim..heads.end * dim), columns: None };
    let name = |tail: &str| format!("{prefix}{tail}");
    let all_z = config.o_groups * config.o_lora_rank;
    let indexer = match kind {
        LayerKind::Sparse => Some(Indexer {
            wq_b: formats.fp8(
                &name("indexer.wq_b"),
                config.index_heads * config.index_head_dim,
                rank,
                &TensorPart::ALL,
            )?,
            weights_proj: formats.bf16(&name("indexer.weights_proj"), config.index_heads, hidden)?,
            compressor: compressor(formats, &name("indexer.compressor."), hidden, 4, config.index_head_dim)?,
        }),
        _ => None,
    };
    let compressor = match kind.ratio() {
        Some(ratio) => Some(compressor(formats, &name("compressor."), hidden, ratio, dim)?),
        None => None,
    };
    Ok(Attention {
        wq_a: formats.fp8(&name("wq_a"), rank, hidden, &TensorPart::ALL)?,
        q_norm: formats.vector(&name("q_norm.weight"), rank)?,
        wq_b: formats.fp8(&name("wq_b"), config.heads * dim, rank, &head_rows)?,
        wkv: formats.fp8(&name("wkv"), dim, hidden, &TensorPart::ALL)?,
        kv_norm: formats.vector(&name("kv_norm.weight"), dim)?,
        sink: formats.plain(
            &name("attn_sink"),
            Dtype::F32,
            &[config.heads],
            &TensorPart { rows: Some(heads), columns: None },
        )?,
        wo_a: formats.fp8(&name("wo_a"), all_z, config.heads_per_group() * dim, &group_rows)?,
        wo_a_bf16: None,
        wo_b: formats.fp8(&name("wo_b"), hidden, all_z, &group_columns)?,
        compressor,
        indexer,
    })
}

fn compressor(
    formats: &mut Formats<'_, '_>,
    prefix: &str,
    hidden: usize,
    ratio: usize,
    dim: usize,
) -> Result<Compressor, WeightsError> {
    let width = if ratio == 4 { 2 * dim } else { dim };
    let position_bias = formats.plain(&format!("{prefix}ape"), Dtype::F32, &[ratio, width], &TensorPart::ALL)?;
    let norm = formats.vector(&format!("{prefix}norm.weight"), dim)?;
    Ok(Compressor {
        wkv: formats.bf16(&format!("{prefix}wkv"), width, hidden)?,
        wgate: formats.bf16(&format!("{prefix}wgate"), width, hidden)?,
        pooling: CompressorWeights { position_bias, norm },
    })
}

fn moe(
    formats: &mut Formats<'_, '_>,
    config: &Config,
    shard: Shard,
    prefix: &str,
    hash: bool,
) -> Result<Moe, WeightsError> {
    let (hidden, width, count) = (config.hidden_size, config.expert_width, config.experts);
    let router = match hash {
        true => {
            let name = format!("{prefix}gate.tid2eid");
            Router::Hash(formats.ids(&name, config.vocab_size, config.experts_per_token, count)?)
        }
        false => {
            Router::Learned(formats.plain(&format!("{prefix}gate.bias"), Dtype::F32, &[count], &TensorPart::ALL)?)
        }
    };
    let (numbers, columns) = (shard.experts(config), shard.expert_columns(config));
    let rows = TensorPart { rows: Some(columns.clone()), columns: None };
    let columns = TensorPart { rows: None, columns: Some(columns) };
    let mut stacked = |w: &str, shape, part| {
        let names: Vec<String> = numbers.clone().map(|e| format!("{prefix}experts.{e}.{w}")).collect();
        formats.fp4(&format!("{prefix}experts.{w}"), &names, shape, part)
    };
    let (gate, up) = (stacked("w1", (width, hidden), &rows)?, stacked("w3", (width, hidden), &rows)?);
    let experts = Experts { gate, up, down: stacked("w2", (hidden, width), &columns)?, count: numbers.len() };
    let name = |w: &str| format!("{prefix}shared_experts.{w}");
    let [gate, up] = formats.fp8_pair(["w1", "w3"].map(name), (width, hidden), &rows)?;
    let shared = Experts { gate, up, down: formats.fp8(&name("w2"), hidden, width, &columns)?, count: 1 };
    let gate = formats.bf16(&format!("{prefix}gate"), count, hidden)?;
    Ok(Moe { gate, router, experts, first: numbers.start, shared })
}
