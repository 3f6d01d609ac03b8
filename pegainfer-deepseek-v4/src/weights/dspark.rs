//! Weights of DSpark's stages (checkpoint 0731).

use super::formats::Formats;
use super::layer::{Layer, hyper, layer};
use super::tensor_part::TensorPart;
use crate::config::{self, Config, LayerKind, STREAMS};
use pegainfer_core::parallel::Shard;
use pegainfer_core::tensor::Tensor;
use pegainfer_core::weights::{StoredDtype as Dtype, WeightsError};
use pegainfer_kernels::ops::Matrix;
use pegainfer_kernels::ops::deepseek_v4::HyperWeights;

/// Window layers with learned gates, and the weights before and after them; formulas: forward/dspark.rs. The embedding
/// and the output matrix are the model's. The checkpoint's confidence head, `confidence_head.proj.weight`, is not
/// loaded.
#[derive(Debug)]
pub struct DSpark {
    /// Projection of the means of the streams after the target layers, `[hidden, targets * hidden]`.
    pub main_projection: Matrix,
    /// Weight of the RMSNorm after it, `[hidden]` bf16.
    pub main_norm: Tensor,
    /// The layers, first to last.
    pub stages: Vec<Layer>,
    /// Mixing of the streams after the last stage.
    pub head_hyper: HyperWeights,
    /// Weight of the RMSNorm before the output matrix, `[hidden]` bf16.
    pub norm: Tensor,
    /// Embedding of the token before, `markov_w1`, whole on every rank, `[vocab, markov_rank]` bf16.
    pub markov_embedding: Tensor,
    /// Projection of it to the addend of the logits, `markov_w2`, whole on every rank, `[vocab, markov_rank]`.
    pub markov_output: Matrix,
}

/// Reads the tensors `mtp.*`, except the confidence head.
pub(super) fn dspark(
    formats: &mut Formats<'_, '_>,
    config: &Config,
    shard: Shard,
    numbers: &config::DSpark,
) -> Result<DSpark, WeightsError> {
    let (hidden, vocab, rank) = (config.hidden_size, config.vocab_size, numbers.markov_rank);
    let last = format!("mtp.{}.", numbers.layers.saturating_sub(1));
    let name = |tail: &str| format!("{last}{tail}");
    let main_projection = formats.fp8("mtp.0.main_proj", hidden, numbers.targets.len() * hidden, &TensorPart::ALL)?;
    let main_norm = formats.vector("mtp.0.main_norm.weight", hidden)?;
    let stage = |i| layer(formats, config, shard, &format!("mtp.{i}."), (LayerKind::Window, false));
    let stages = (0..numbers.layers).map(stage).collect::<Result<_, _>>()?;
    Ok(DSpark {
        main_projection,
        main_norm,
        stages,
        head_hyper: hyper(formats, &name("hc_head"), STREAMS, 1, hidden)?,
        norm: formats.vector(&name("norm.weight"), hidden)?,
        markov_embedding: formats.plain(
            &name("markov_head.markov_w1.weight"),
            Dtype::BF16,
            &[vocab, rank],
            &TensorPart::ALL,
        )?,
        markov_output: formats.bf16(&name("markov_head.markov_w2"), vocab, rank)?,
    })
}
