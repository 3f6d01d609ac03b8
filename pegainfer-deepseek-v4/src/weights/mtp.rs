//! Weights of the layer that drafts (multi-token prediction) of the April checkpoint.

use super::formats::Formats;
use super::layer::{Layer, hyper, layer};
use super::tensor_part::TensorPart;
use crate::config::{Config, LayerKind, STREAMS};
use pegainfer_core::parallel::Shard;
use pegainfer_core::tensor::Tensor;
use pegainfer_core::weights::WeightsError;
use pegainfer_kernels::ops::Matrix;
use pegainfer_kernels::ops::deepseek_v4::HyperWeights;

/// A window layer with a learned gate, and the weights before and after it; formulas: forward/draft.rs. The embedding
/// and the output matrix are the model's.
#[derive(Debug)]
pub struct Mtp {
    /// Weight of the RMSNorm of the embedding, `[hidden]` bf16.
    pub embedding_norm: Tensor,
    /// Projection of the normalised embedding, `[hidden, hidden]`.
    pub embedding_projection: Matrix,
    /// Weight of the RMSNorm of each residual stream, `[hidden]` bf16.
    pub stream_norm: Tensor,
    /// Projection of each normalised stream, `[hidden, hidden]`.
    pub stream_projection: Matrix,
    /// The layer.
    pub layer: Layer,
    /// Mixing of the streams after the layer.
    pub head_hyper: HyperWeights,
    /// Weight of the RMSNorm before the output matrix, `[hidden]` bf16.
    pub norm: Tensor,
}

/// Reads the tensors `mtp.0.*`.
pub(super) fn mtp(formats: &mut Formats<'_, '_>, config: &Config, shard: Shard) -> Result<Mtp, WeightsError> {
    let hidden = config.hidden_size;
    Ok(Mtp {
        embedding_norm: formats.vector("mtp.0.enorm.weight", hidden)?,
        embedding_projection: formats.fp8("mtp.0.e_proj", hidden, hidden, &TensorPart::ALL)?,
        stream_norm: formats.vector("mtp.0.hnorm.weight", hidden)?,
        stream_projection: formats.fp8("mtp.0.h_proj", hidden, hidden, &TensorPart::ALL)?,
        layer: layer(formats, config, shard, "mtp.0.", (LayerKind::Window, false))?,
        head_hyper: hyper(formats, "mtp.0.hc_head", STREAMS, 1, hidden)?,
        norm: formats.vector("mtp.0.norm.weight", hidden)?,
    })
}
