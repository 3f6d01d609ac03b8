//! The weights of a Qwen3 model on a device, projections that share an input fused.

use crate::config::{Config, EMBEDDING};
use pegainfer_core::tensor::Tensor;
use pegainfer_core::weights::{Loader, Part, WeightsError};
use pegainfer_kernels::runtime::{Attention, DecoderWeights, Mlp, load_head, projection_bytes};

/// One decoder layer.
#[derive(Debug)]
pub struct Layer {
    /// `[hidden]`.
    pub input_norm: Tensor,
    /// The first half.
    pub attention: Attention,
    /// The second half.
    pub mlp: Mlp,
}

/// All weights.
pub type Weights = DecoderWeights<Layer>;

/// Loads every tensor.
pub(crate) fn load(loader: &mut Loader<'_>, config: &Config) -> Result<Weights, WeightsError> {
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    Ok(Weights {
        embedding: loader.matrix(EMBEDDING.to_owned(), vocab, hidden)?,
        layers: (0..config.layers).map(|i| Layer::load(loader, config, i)).collect::<Result<_, _>>()?,
        norm: loader.vector("model.norm.weight".to_owned(), hidden)?,
        head: load_head(loader, config.tie_word_embeddings, vocab, hidden)?,
    })
}

fn prefix(i: usize) -> String {
    format!("model.layers.{i}")
}

/// The projections of queries, keys and values of layer `i`, `hidden` columns each, and its output projection.
fn attention(config: &Config, i: usize) -> ([Part; 3], [Part; 1]) {
    let part = |tail: &str, rows| Part { name: format!("{}.self_attn.{tail}.weight", prefix(i)), rows };
    let kv = config.shape.kv_heads * config.shape.head_dim;
    let qkv = [part("q_proj", config.shape.q_width()), part("k_proj", kv), part("v_proj", kv)];
    (qkv, [part("o_proj", config.hidden_size)])
}

/// Bytes of the weights as loaded.
pub fn bytes(config: &Config) -> u64 {
    let norms = config.layers * 2 * (config.shape.head_dim + config.hidden_size) + config.hidden_size;
    let tables = if config.tie_word_embeddings { 1 } else { 2 } * config.vocab_size * config.hidden_size;
    let matrices: u64 = (0..config.layers).map(|i| layer_bytes(config, i)).sum();
    matrices + 2 * (tables + norms) as u64
}

/// Bytes of the matrices of layer `i`.
fn layer_bytes(config: &Config, i: usize) -> u64 {
    let (quantization, hidden) = (config.quantization.as_ref(), config.hidden_size);
    let (qkv, [o]) = attention(config, i);
    let bytes = |part: &Part, cols| projection_bytes(quantization, &part.name, part.rows, cols);
    let attention = qkv.iter().map(|part| bytes(part, hidden)).sum::<u64>() + bytes(&o, config.shape.q_width());
    attention + Mlp::bytes(&prefix(i), (hidden, config.intermediate_size), quantization)
}

impl Layer {
    fn load(loader: &mut Loader<'_>, config: &Config, i: usize) -> Result<Self, WeightsError> {
        let (prefix, hidden, quantization) = (prefix(i), config.hidden_size, config.quantization.as_ref());
        let name = |tail: &str| format!("{prefix}.{tail}.weight");
        let vector = |loader: &mut Loader<'_>, name, len| loader.vector(name, len);
        Ok(Self {
            input_norm: loader.vector(name("input_layernorm"), hidden)?,
            attention: Attention::load(loader, &prefix, config.decoder(), quantization, vector)?,
            mlp: {
                let norm = loader.vector(name("post_attention_layernorm"), hidden)?;
                Mlp::load(loader, &prefix, norm, (hidden, config.intermediate_size), quantization)?
            },
        })
    }
}
