//! Device state of a request between steps: K and V in blocks of the pool, and the state of recurrent layers in a slot.

use crate::config::{Config, LayerKind};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, Tensor};
use pegainfer_runtime::KvLayer;

/// State of one layer.
#[derive(Debug)]
pub enum LayerState {
    /// The slots of a gated delta rule layer; see `DeltaShape` for the layout.
    Linear {
        /// Memory matrices, `[slots, value_heads, value_dim, key_dim]` f32.
        states: Tensor,
        /// Convolution state: its last inputs, `[slots, conv_width - 1, channels]` bf16.
        conv: Tensor,
    },
    /// The paged cache of a full attention layer.
    Full(KvLayer),
}

impl LayerState {
    /// Keys and values of a full attention layer.
    pub fn kv(&mut self) -> &mut KvLayer {
        let Self::Full(kv) = self else { unreachable!("state of another kind") };
        kv
    }

    /// Memory matrices and convolution state of a gated delta rule layer.
    pub fn recurrent(&mut self) -> (&mut Tensor, &mut Tensor) {
        let Self::Linear { states, conv } = self else { unreachable!("state of another kind") };
        (states, conv)
    }
}

/// Allocates the state of every layer; that of the layer that drafts comes last. On the CPU, pages take memory when
/// they are first written.
pub fn allocate(exec: &mut Exec, config: &Config, blocks: usize, slots: usize) -> std::io::Result<Vec<LayerState>> {
    let (states, conv) = (config.delta.states(slots), config.delta.conv_states(slots));
    let mut layer = |kind: &LayerKind| {
        Ok(match kind {
            LayerKind::Linear => LayerState::Linear {
                states: exec.tensor("state.memory", &states, DType::F32)?,
                conv: exec.tensor("state.tail", &conv, DType::Bf16)?,
            },
            LayerKind::Full => LayerState::Full(KvLayer::new(exec, config.shape, config.kv_dtype, blocks)?),
        })
    };
    // The cache of the layer that drafts comes after the others.
    config.layers.iter().chain(config.mtp.then_some(&LayerKind::Full)).map(&mut layer).collect()
}
