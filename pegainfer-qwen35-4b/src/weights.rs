//! The weights of a Qwen3.5 model on a device, projections that share an input fused.

use crate::config::{Config, LayerKind};
use pegainfer_core::tensor::Tensor;
use pegainfer_core::weights::{Loader, Part, WeightsError};
use pegainfer_kernels::runtime::{DecoderWeights, Mlp, load_head};

/// Beginnings of the names of tensors that a text engine does not run, and what they are for.
const SKIPPED: [(&str, &str); 2] = [("model.visual.", "the image encoder"), ("mtp.", "multi-token prediction")];

/// What mixes the tokens in a layer.
#[derive(Debug)]
pub enum Mixer {
    /// The gated delta rule.
    Linear(LinearAttention),
    /// Gated softmax attention.
    Full(FullAttention),
}

/// Weights of a gated delta rule layer; shapes are those of `DeltaShape`.
#[derive(Debug)]
pub struct LinearAttention {
    /// q, k, v, z, b, a: `[projected_width, hidden]`.
    pub projection: Tensor,
    /// `[conv_width, channels]` f32.
    pub conv: Tensor,
    /// `[value_heads]` f32.
    pub a_log: Tensor,
    /// `[value_heads]` f32.
    pub dt_bias: Tensor,
    /// `[value_dim]` f32.
    pub norm: Tensor,
    /// `[hidden, v_width]`.
    pub out: Tensor,
}

/// Weights of a full attention layer.
#[derive(Debug)]
pub struct FullAttention {
    /// Query and gate of each head in turn, keys, values: `[gated_qkv_width, hidden]`.
    pub projection: Tensor,
    /// `1 + w`, `[head_dim]` f32.
    pub q_norm: Tensor,
    /// `1 + w`, `[head_dim]` f32.
    pub k_norm: Tensor,
    /// `[hidden, heads * head_dim]`.
    pub out: Tensor,
}

/// One decoder layer.
#[derive(Debug)]
pub struct Layer {
    /// `1 + w`, `[hidden]` f32.
    pub input_norm: Tensor,
    /// The first half.
    pub mixer: Mixer,
    /// The second half; its norm is `1 + w`, f32.
    pub mlp: Mlp,
}

/// All weights; the final norm is `1 + w`, f32.
pub type Weights = DecoderWeights<Layer>;

/// What a text engine does not load.
pub(crate) fn skipped(name: &str) -> Option<&'static str> {
    SKIPPED.iter().find(|(prefix, _)| name.starts_with(prefix)).map(|(_, purpose)| *purpose)
}

/// Loads every tensor of the text model.
pub(crate) fn load(loader: &mut Loader<'_>, config: &Config) -> Result<Weights, WeightsError> {
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    let layers = config.layers.iter().enumerate();
    Ok(Weights {
        embedding: loader.matrix("model.language_model.embed_tokens.weight".to_owned(), vocab, hidden)?,
        layers: layers.map(|(i, kind)| Layer::load(loader, config, i, *kind)).collect::<Result<_, _>>()?,
        norm: scale(loader, "model.language_model.norm.weight".to_owned(), hidden)?,
        head: load_head(loader, config.tie_word_embeddings, vocab, hidden)?,
    })
}

/// The weight of a norm that is stored as its difference from 1. The sum is kept in f32: bf16 would round it.
fn scale(loader: &mut Loader<'_>, name: String, len: usize) -> Result<Tensor, WeightsError> {
    loader.converted(name, &[len], 0.0, &[len], |w| w.into_iter().map(|w| 1.0 + w).collect())
}

/// A vector as it is stored, in f32.
fn vector(loader: &mut Loader<'_>, name: String, len: usize) -> Result<Tensor, WeightsError> {
    loader.converted(name, &[len], 1.0, &[len], |values| values)
}

fn prefix(i: usize) -> String {
    format!("model.language_model.layers.{i}")
}

impl Layer {
    fn load(loader: &mut Loader<'_>, config: &Config, i: usize, kind: LayerKind) -> Result<Self, WeightsError> {
        let (prefix, hidden) = (prefix(i), config.hidden_size);
        Ok(Self {
            input_norm: scale(loader, format!("{prefix}.input_layernorm.weight"), hidden)?,
            mixer: match kind {
                LayerKind::Linear => Mixer::Linear(LinearAttention::load(loader, config, i)?),
                LayerKind::Full => Mixer::Full(FullAttention::load(loader, config, i)?),
            },
            mlp: {
                let norm = scale(loader, format!("{prefix}.post_attention_layernorm.weight"), hidden)?;
                Mlp::load(loader, &prefix, norm, hidden, config.intermediate_size)?
            },
        })
    }
}

impl LinearAttention {
    fn load(loader: &mut Loader<'_>, config: &Config, i: usize) -> Result<Self, WeightsError> {
        let (hidden, shape) = (config.hidden_size, config.delta);
        let name = |tail: &str| format!("{}.linear_attn.{tail}", prefix(i));
        let part = |tail: &str, rows| Part { name: name(tail), rows };
        let parts = [
            part("in_proj_qkv.weight", shape.channels()),
            part("in_proj_z.weight", shape.v_width()),
            part("in_proj_b.weight", shape.value_heads),
            part("in_proj_a.weight", shape.value_heads),
        ];
        let (width, channels) = (shape.conv_width, shape.channels());
        // Stored by channel; the kernels take neighbouring channels of one of the `width` inputs at once.
        let transpose =
            |w: Vec<f32>| (0..width * channels).map(|at| w[at % channels * width + at / channels]).collect();
        let average = 1.0 / width as f32;
        Ok(Self {
            projection: loader.stacked(&name("in_proj.weight"), &parts, hidden)?,
            conv: loader.converted(
                name("conv1d.weight"),
                &[channels, 1, width],
                average,
                &[width, channels],
                transpose,
            )?,
            a_log: vector(loader, name("A_log"), shape.value_heads)?,
            dt_bias: vector(loader, name("dt_bias"), shape.value_heads)?,
            norm: vector(loader, name("norm.weight"), shape.value_dim)?,
            out: loader.matrix(name("out_proj.weight"), hidden, shape.v_width())?,
        })
    }
}

impl FullAttention {
    fn load(loader: &mut Loader<'_>, config: &Config, i: usize) -> Result<Self, WeightsError> {
        let (hidden, shape) = (config.hidden_size, config.shape);
        let name = |tail: &str| format!("{}.self_attn.{tail}.weight", prefix(i));
        let part = |tail: &str, rows| Part { name: name(tail), rows };
        let kv = shape.kv_heads * shape.head_dim;
        let parts = [part("q_proj", 2 * shape.q_width()), part("k_proj", kv), part("v_proj", kv)];
        Ok(Self {
            projection: loader.stacked(&name("qkv_proj"), &parts, hidden)?,
            q_norm: scale(loader, name("q_norm"), shape.head_dim)?,
            k_norm: scale(loader, name("k_norm"), shape.head_dim)?,
            out: loader.matrix(name("o_proj"), hidden, shape.q_width())?,
        })
    }
}
