//! The weights of a Qwen3 model on a device, projections that share an input fused.

use crate::config::Config;
use pegainfer_core::tensor::Tensor;
use pegainfer_core::weights::{Loader, Part, WeightsError};
use pegainfer_kernels::runtime::{DecoderWeights, Mlp, load_head};

/// One decoder layer.
#[derive(Debug)]
pub struct Layer {
    /// `[hidden]`.
    pub input_norm: Tensor,
    /// Queries, keys, values: `[(heads + 2 kv_heads) * head_dim, hidden]`.
    pub qkv: Tensor,
    /// `[head_dim]`.
    pub q_norm: Tensor,
    /// `[head_dim]`.
    pub k_norm: Tensor,
    /// `[hidden, heads * head_dim]`.
    pub o: Tensor,
    /// The second half.
    pub mlp: Mlp,
}

/// All weights.
pub type Weights = DecoderWeights<Layer>;

/// Loads every tensor.
pub(crate) fn load(loader: &mut Loader<'_>, config: &Config) -> Result<Weights, WeightsError> {
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    Ok(Weights {
        embedding: loader.matrix("model.embed_tokens.weight".to_owned(), vocab, hidden)?,
        layers: (0..config.layers).map(|i| Layer::load(loader, config, i)).collect::<Result<_, _>>()?,
        norm: loader.vector("model.norm.weight".to_owned(), hidden)?,
        head: load_head(loader, config.tie_word_embeddings, vocab, hidden)?,
    })
}

impl Layer {
    fn load(loader: &mut Loader<'_>, config: &Config, i: usize) -> Result<Self, WeightsError> {
        let prefix = format!("model.layers.{i}");
        let name = |tail: &str| format!("{prefix}.{tail}.weight");
        let part = |tail: &str, rows| Part { name: name(tail), rows };
        let (hidden, shape) = (config.hidden_size, config.shape);
        let kv = shape.kv_heads * shape.head_dim;
        let qkv =
            [part("self_attn.q_proj", shape.q_width()), part("self_attn.k_proj", kv), part("self_attn.v_proj", kv)];
        Ok(Self {
            input_norm: loader.vector(name("input_layernorm"), hidden)?,
            qkv: loader.stacked(&name("self_attn.qkv_proj"), &qkv, hidden)?,
            q_norm: loader.vector(name("self_attn.q_norm"), shape.head_dim)?,
            k_norm: loader.vector(name("self_attn.k_norm"), shape.head_dim)?,
            o: loader.matrix(name("self_attn.o_proj"), hidden, shape.q_width())?,
            mlp: {
                let norm = loader.vector(name("post_attention_layernorm"), hidden)?;
                Mlp::load(loader, &prefix, norm, hidden, config.intermediate_size)?
            },
        })
    }

    /// Weights of the norms of queries and of keys.
    pub(crate) fn head_norms(&self) -> (&Tensor, &Tensor) {
        (&self.q_norm, &self.k_norm)
    }
}
