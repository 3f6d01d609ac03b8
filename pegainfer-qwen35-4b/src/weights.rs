//! The weights of a Qwen3.5 model on a device, projections that share an input fused.

use crate::config::{Config, LayerKind};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::Tensor;
use pegainfer_core::weights::{Loader, Part, Source, WeightsError};

/// Parts of a checkpoint that a text engine does not run: the image encoder, and the head that predicts a second token.
const SKIPPED: [&str; 2] = ["model.visual.", "mtp."];

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
    /// `[taps, channels]` f32.
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
    /// `1 + w`, `[hidden]` f32.
    pub post_norm: Tensor,
    /// Gate, then up: `[2 * intermediate, hidden]`.
    pub gate_up: Tensor,
    /// `[hidden, intermediate]`.
    pub down: Tensor,
}

/// All weights.
#[derive(Debug)]
pub struct Weights {
    /// `[vocab, hidden]`.
    pub embedding: Tensor,
    /// Decoder layers, first to last.
    pub layers: Vec<Layer>,
    /// `1 + w`, `[hidden]` f32.
    pub norm: Tensor,
    /// `[vocab, hidden]`; `None` when tied to the embedding.
    pub head: Option<Tensor>,
}

impl Weights {
    /// Loads every tensor of the text model; `progress` is called with the bytes of each piece.
    pub fn load(
        exec: &mut Exec,
        config: &Config,
        source: &Source,
        progress: &mut (dyn FnMut(u64) + Send),
    ) -> Result<Self, WeightsError> {
        let skipped = source.names().filter(|name| SKIPPED.iter().any(|prefix| name.starts_with(prefix))).count();
        if skipped > 0 {
            log::info!(
                "{skipped} tensors of the image encoder and of multi-token prediction are not loaded: text only"
            );
        }
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        Loader::run(exec, source, progress, |loader| {
            let embedding = loader.matrix("model.language_model.embed_tokens.weight".to_owned(), vocab, hidden)?;
            let layers = config.layers.iter().enumerate();
            let layers = layers.map(|(i, kind)| Layer::load(loader, config, i, *kind)).collect::<Result<_, _>>()?;
            let norm = scale(loader, "model.language_model.norm.weight".to_owned(), hidden)?;
            let head = match config.tie_word_embeddings {
                true => None,
                false => Some(loader.matrix("lm_head.weight".to_owned(), vocab, hidden)?),
            };
            Ok(Self { embedding, layers, norm, head })
        })
    }

    /// The matrix that gives logits.
    pub fn output(&self) -> &Tensor {
        self.head.as_ref().unwrap_or(&self.embedding)
    }
}

/// The weight of a norm that is stored as its difference from 1. The sum is kept in f32: bf16 would round it.
fn scale(loader: &mut Loader<'_>, name: String, len: usize) -> Result<Tensor, WeightsError> {
    loader.converted(name, &[len], 0.0, &[len], |w| w.into_iter().map(|w| 1.0 + w).collect())
}

/// A vector as it is stored, in f32.
fn vector(loader: &mut Loader<'_>, name: String, len: usize) -> Result<Tensor, WeightsError> {
    loader.converted(name, &[len], 1.0, &[len], |values| values)
}

fn name(i: usize, tail: &str) -> String {
    format!("model.language_model.layers.{i}.{tail}")
}

impl Layer {
    fn load(loader: &mut Loader<'_>, config: &Config, i: usize, kind: LayerKind) -> Result<Self, WeightsError> {
        let (hidden, width) = (config.hidden_size, config.intermediate_size);
        let part = |tail: &str, rows| Part { name: name(i, tail), rows };
        let gate_up = [part("mlp.gate_proj.weight", width), part("mlp.up_proj.weight", width)];
        Ok(Self {
            input_norm: scale(loader, name(i, "input_layernorm.weight"), hidden)?,
            mixer: match kind {
                LayerKind::Linear => Mixer::Linear(LinearAttention::load(loader, config, i)?),
                LayerKind::Full => Mixer::Full(FullAttention::load(loader, config, i)?),
            },
            post_norm: scale(loader, name(i, "post_attention_layernorm.weight"), hidden)?,
            gate_up: loader.stacked(&name(i, "mlp.gate_up_proj.weight"), &gate_up, hidden)?,
            down: loader.matrix(name(i, "mlp.down_proj.weight"), hidden, width)?,
        })
    }
}

impl LinearAttention {
    fn load(loader: &mut Loader<'_>, config: &Config, i: usize) -> Result<Self, WeightsError> {
        let (hidden, shape) = (config.hidden_size, config.delta);
        let name = |tail: &str| name(i, &format!("linear_attn.{tail}"));
        let part = |tail: &str, rows| Part { name: name(tail), rows };
        let parts = [
            part("in_proj_qkv.weight", shape.channels()),
            part("in_proj_z.weight", shape.v_width()),
            part("in_proj_b.weight", shape.value_heads),
            part("in_proj_a.weight", shape.value_heads),
        ];
        let (taps, channels) = (shape.taps, shape.channels());
        // Stored by channel; the kernels take neighbouring channels of one tap at once.
        let transpose = |w: Vec<f32>| (0..taps * channels).map(|at| w[at % channels * taps + at / channels]).collect();
        let average = 1.0 / taps as f32;
        Ok(Self {
            projection: loader.stacked(&name("in_proj.weight"), &parts, hidden)?,
            conv: loader.converted(
                name("conv1d.weight"),
                &[channels, 1, taps],
                average,
                &[taps, channels],
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
        let name = |tail: &str| name(i, &format!("self_attn.{tail}.weight"));
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
