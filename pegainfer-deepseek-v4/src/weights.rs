//! The weights of one rank, in the formats of the checkpoint.

mod dspark;
mod dummy;
mod formats;
mod layer;
mod mtp;
mod tensor_part;
#[cfg(test)]
mod tests;

use crate::config::{Config, Drafts, LayerKind, STREAMS};
use crate::shard::RankParts;
use formats::Formats;
use layer::{hyper, layer};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::parallel::Shard;
use pegainfer_core::tensor::{DType, Tensor};
use pegainfer_core::weights::{Loader, StoredDtype as Dtype, WeightsError};
use pegainfer_kernels::ops::Matrix;
use pegainfer_kernels::ops::deepseek_v4::{HyperWeights, takes_packed_rows, widen};
use tensor_part::TensorPart;

pub use dspark::DSpark;
pub use layer::{Attention, Compressor, Indexer, Layer, Moe, Router};
pub use mtp::Mtp;

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

impl Weights {
    /// Adds `wo_a` of every layer in bf16 if the device has GEMMs that take it in bf16, because the reference does not
    /// round the activation multiplied by it. The FP8 codes stay, because a step of few tokens reads them in half the
    /// time. On `Meta`, counts memory as on such a GPU.
    pub(crate) fn widen(&mut self, exec: &mut Exec, activations: DType) -> Result<(), WeightsError> {
        let stages = self.dspark.iter_mut().flat_map(|dspark| &mut dspark.stages);
        let layers = self.layers.iter_mut().chain(self.mtp.iter_mut().map(|mtp| &mut mtp.layer)).chain(stages);
        for layer in layers {
            let Attention { wo_a, wo_a_bf16, .. } = &mut layer.attn;
            let (rows, columns) = wo_a.shape();
            let takes = match exec.device() {
                Device::Meta => activations == DType::Bf16,
                _ => takes_packed_rows(exec, activations, columns).map_err(WeightsError::Device)?,
            };
            if takes && matches!(wo_a, Matrix::Fp8 { .. }) {
                let out_of_memory = |error| {
                    let (name, bytes) = ("wo_a in bf16".to_owned(), (rows * columns * DType::Bf16.size()) as u64);
                    WeightsError::OutOfMemory { name, bytes, error }
                };
                let mut wide = exec.tensor("wo_a.bf16", &[rows, columns], DType::Bf16).map_err(out_of_memory)?;
                widen(exec, wo_a, &mut wide).map_err(WeightsError::Device)?;
                *wo_a_bf16 = Some(Matrix::Bf16(wide));
            }
        }
        Ok(())
    }
}

/// Loads all tensors of `shard`; draft layers only if `config` asks for them.
pub(crate) fn load(loader: &mut Loader<'_>, config: &Config, shard: Shard) -> Result<Weights, WeightsError> {
    let formats = &mut Formats { loader, quantized: config.quantized };
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    let rows = TensorPart { rows: Some(shard.vocab(config)), columns: None };
    let layer = |(i, kind): (usize, &LayerKind)| {
        layer(formats, config, shard, &format!("layers.{i}."), (*kind, i < config.hash_layers))
    };
    let layers = config.layers.iter().enumerate().map(layer).collect::<Result<_, _>>()?;
    let has_mtp = config.loads_drafts && matches!(config.drafts, Drafts::Mtp { .. });
    Ok(Weights {
        embedding: formats.plain("embed.weight", Dtype::BF16, &[vocab, hidden], &rows)?,
        layers,
        head_hyper: hyper(formats, "hc_head", STREAMS, 1, hidden)?,
        norm: formats.vector("norm.weight", hidden)?,
        head: Matrix::Bf16(formats.plain("head.weight", Dtype::BF16, &[vocab, hidden], &rows)?),
        mtp: has_mtp.then(|| mtp::mtp(formats, config, shard)).transpose()?,
        dspark: config.loaded_dspark().map(|numbers| dspark::dspark(formats, config, shard, numbers)).transpose()?,
    })
}
