//! The weights of a Qwen3 model on a device, projections that share an input fused.

use crate::config::Config;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::Tensor;
use pegainfer_core::weights::{Loader, Part, Source, WeightsError};

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
    /// `[hidden]`.
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
    /// `[hidden]`.
    pub norm: Tensor,
    /// `[vocab, hidden]`; `None` when tied to the embedding.
    pub head: Option<Tensor>,
}

impl Weights {
    /// Loads every tensor; `progress` is called with the bytes of each piece.
    ///
    /// Small official checkpoints store a redundant copy of a tied `lm_head.weight`: it is not read.
    pub fn load(
        exec: &mut Exec,
        config: &Config,
        source: &Source,
        progress: &mut (dyn FnMut(u64) + Send),
    ) -> Result<Self, WeightsError> {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        Loader::run(exec, source, progress, |loader| {
            let embedding = loader.matrix("model.embed_tokens.weight".to_owned(), vocab, hidden)?;
            let layers = (0..config.layers).map(|i| Layer::load(loader, config, i)).collect::<Result<_, _>>()?;
            let norm = loader.vector("model.norm.weight".to_owned(), hidden)?;
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

impl Layer {
    fn load(loader: &mut Loader<'_>, config: &Config, i: usize) -> Result<Self, WeightsError> {
        let name = |tail: &str| format!("model.layers.{i}.{tail}.weight");
        let part = |tail: &str, rows| Part { name: name(tail), rows };
        let (hidden, width, shape) = (config.hidden_size, config.intermediate_size, config.shape);
        let kv = shape.kv_heads * shape.head_dim;
        let qkv =
            [part("self_attn.q_proj", shape.q_width()), part("self_attn.k_proj", kv), part("self_attn.v_proj", kv)];
        let gate_up = [part("mlp.gate_proj", width), part("mlp.up_proj", width)];
        Ok(Self {
            input_norm: loader.vector(name("input_layernorm"), hidden)?,
            qkv: loader.stacked(&name("self_attn.qkv_proj"), &qkv, hidden)?,
            q_norm: loader.vector(name("self_attn.q_norm"), shape.head_dim)?,
            k_norm: loader.vector(name("self_attn.k_norm"), shape.head_dim)?,
            o: loader.matrix(name("self_attn.o_proj"), hidden, shape.q_width())?,
            post_norm: loader.vector(name("post_attention_layernorm"), hidden)?,
            gate_up: loader.stacked(&name("mlp.gate_up_proj"), &gate_up, hidden)?,
            down: loader.matrix(name("mlp.down_proj"), hidden, width)?,
        })
    }
}
