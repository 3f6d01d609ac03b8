//! The weights of one rank, in the formats of the checkpoint.

mod dspark;
mod dummy;
mod feed;
mod layer;
mod load;
mod mtp;
mod part;
mod reader;
mod source;

use crate::config::{Config, Drafts, LayerKind, STREAMS};
use crate::shard::Shard;
use layer::{hyper, layer};
use part::Part;
use pegainfer_core::tensor::Tensor;
use pegainfer_core::weights::{StoredDtype as Dtype, WeightsError};
use pegainfer_kernels::ops::Matrix;
use pegainfer_kernels::ops::deepseek_v4::HyperWeights;
use reader::Reader;

pub use dspark::DSpark;
pub use layer::{Attention, Compressor, Indexer, Layer, Moe, Router};
pub use load::LoadProgress;
pub use mtp::Mtp;
pub use source::Source;

/// All weights of a rank.
#[derive(Debug)]
pub struct Weights {
    /// The rank's rows, `[vocab / ranks, hidden]` bf16.
    pub embedding: Tensor,
    /// First to last.
    pub layers: Vec<Layer>,
    /// Mixing of the streams at the end.
    pub head_hyper: HyperWeights,
    /// `[hidden]` bf16.
    pub norm: Tensor,
    /// The rank's rows, `[vocab / ranks, hidden]`.
    pub head: Matrix,
    /// The layer for multi-token prediction; `None` if it is not loaded.
    pub mtp: Option<Mtp>,
    /// DSpark's stages; `None` if they are not loaded.
    pub dspark: Option<DSpark>,
}

/// All tensors of `shard`, in the same order on every rank.
fn read(reader: &mut Reader<'_>, config: &Config, shard: Shard) -> Result<Weights, WeightsError> {
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    let rows = Part { rows: Some(shard.vocab(config)), columns: None };
    let layer = |(i, kind): (usize, &LayerKind)| {
        layer(reader, config, shard, &format!("layers.{i}."), (*kind, i < config.hash_layers))
    };
    let layers = config.layers.iter().enumerate().map(layer).collect::<Result<_, _>>()?;
    let has_mtp = config.loads_drafts && matches!(config.drafts, Drafts::Mtp { .. });
    Ok(Weights {
        embedding: reader.plain("embed.weight", Dtype::BF16, &[vocab, hidden], rows.clone())?,
        layers,
        head_hyper: hyper(reader, "hc_head", STREAMS, 1, hidden)?,
        norm: reader.vector("norm.weight", hidden)?,
        head: Matrix::Bf16(reader.plain("head.weight", Dtype::BF16, &[vocab, hidden], rows)?),
        mtp: has_mtp.then(|| mtp::mtp(reader, config, shard)).transpose()?,
        dspark: config.loaded_dspark().map(|numbers| dspark::dspark(reader, config, shard, numbers)).transpose()?,
    })
}
