//! The weights of a Qwen3 model on a device, projections that share an input fused.

use crate::config::{Config, EMBEDDING};
use pegainfer_core::tensor::Tensor;
use pegainfer_core::weights::{Loader, WeightsError};
use pegainfer_runtime::{Attention, DecoderWeights, DenseMlp, LayerSources, Mlp, MoeShape, load_embedding, load_head};

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
    let hidden = config.hidden_size;
    let mut embedding = load_embedding(loader, EMBEDDING, (config.vocab_size, hidden), config.shard)?;
    if config.moe.is_some() {
        MoeShape::scale_embedding(loader, (EMBEDDING, config.vocab_size), config.initializer_range, &mut embedding)?;
    }
    Ok(Weights {
        layers: (0..config.layers).map(|i| Layer::load(loader, config, i)).collect::<Result<_, _>>()?,
        norm: loader.vector("model.norm.weight".to_owned(), hidden)?,
        head: {
            let (tied, table) = (config.tie_word_embeddings, (&embedding, config.vocab_size));
            load_head(loader, config.quantization.as_ref(), tied, table, config.shard)?
        },
        embedding,
    })
}

/// Where the projections of layer `i` that adapters may change are in the checkpoint: no experts.
pub(crate) fn sources(config: &Config, i: usize) -> LayerSources {
    let (prefix, shape) = (prefix(i), config.decoder());
    let [input, output] = Attention::sources(&prefix, &shape).map(Some);
    let [gate_up, down] = match config.sparse_number(i).is_some() {
        true => [None, None],
        false => DenseMlp::sources(&prefix, &shape).map(Some),
    };
    LayerSources { input, output, gate_up, down }
}

fn prefix(i: usize) -> String {
    format!("model.layers.{i}")
}

impl Layer {
    fn load(loader: &mut Loader<'_>, config: &Config, i: usize) -> Result<Self, WeightsError> {
        let prefix = prefix(i);
        let (hidden, quantization, shape) = (config.hidden_size, config.quantization.as_ref(), config.decoder());
        let name = |tail: &str| format!("{prefix}.{tail}.weight");
        let vector = |loader: &mut Loader<'_>, name, len| loader.vector(name, len);
        Ok(Self {
            input_norm: loader.vector(name("input_layernorm"), hidden)?,
            attention: Attention::load(loader, &prefix, shape, quantization, vector)?,
            mlp: {
                let norm = loader.vector(name("post_attention_layernorm"), hidden)?;
                Mlp::load(loader, &prefix, (norm, config.sparse_number(i)), &shape, quantization)?
            },
        })
    }
}
