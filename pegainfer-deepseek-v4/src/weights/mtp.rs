//! The layer that drafts (multi-token prediction) of the April checkpoint.

use super::reader::Reader;
use super::{Layer, Part, hyper, layer};
use crate::config::{Config, LayerKind, STREAMS};
use crate::shard::Shard;
use pegainfer_core::tensor::Tensor;
use pegainfer_core::weights::WeightsError;
use pegainfer_kernels::ops::Matrix;
use pegainfer_kernels::ops::deepseek_v4::HyperWeights;

/// A window layer with a learned gate, and what comes before and behind it; embedding and output matrix are the model's.
#[derive(Debug)]
pub struct Mtp {
    /// Of the embedding, `[hidden]` bf16.
    pub embedding_norm: Tensor,
    /// `[hidden, hidden]`.
    pub embedding_projection: Matrix,
    /// Of each stream, `[hidden]` bf16.
    pub stream_norm: Tensor,
    /// Of each stream, `[hidden, hidden]`.
    pub stream_projection: Matrix,
    /// The layer.
    pub layer: Layer,
    /// Mixing of the streams at the end.
    pub head_hyper: HyperWeights,
    /// `[hidden]` bf16.
    pub norm: Tensor,
}

/// The tensors `mtp.0.*`.
pub(super) fn mtp(reader: &mut Reader<'_>, config: &Config, shard: Shard) -> Result<Mtp, WeightsError> {
    let hidden = config.hidden_size;
    Ok(Mtp {
        embedding_norm: reader.vector("mtp.0.enorm.weight", hidden)?,
        embedding_projection: reader.fp8("mtp.0.e_proj", hidden, hidden, Part::ALL)?,
        stream_norm: reader.vector("mtp.0.hnorm.weight", hidden)?,
        stream_projection: reader.fp8("mtp.0.h_proj", hidden, hidden, Part::ALL)?,
        layer: layer(reader, config, shard, "mtp.0.", (LayerKind::Window, false))?,
        head_hyper: hyper(reader, "mtp.0.hc_head", STREAMS, 1, hidden)?,
        norm: reader.vector("mtp.0.norm.weight", hidden)?,
    })
}
