//! What a request leaves on the device between steps: K and V in the blocks of the pool, and the state of its recurrent
//! layers in a slot.

use crate::config::{Config, LayerKind};
use crate::engine::LoadError;
use crate::executor::StepBounds;
use pegainfer_core::exec::Exec;
use pegainfer_core::kv::DeviceMemory;
use pegainfer_core::tensor::{DType, Tensor};

/// What one layer remembers.
#[derive(Debug)]
pub enum LayerState {
    /// The slots of a gated delta rule layer; see `DeltaShape` for the layout.
    Linear {
        /// Memory matrices, `[slots, value_heads, value_dim, key_dim]` f32.
        states: Tensor,
        /// Last inputs of the convolution, `[slots, taps - 1, channels]` bf16.
        tails: Tensor,
    },
    /// The paged cache of a full attention layer; see `HeadShape::cache` for the layout.
    Full {
        /// Keys.
        k: Tensor,
        /// Values.
        v: Tensor,
    },
}

impl LayerState {
    /// Keys and values of a full attention layer.
    pub fn cache(&mut self) -> (&mut Tensor, &mut Tensor) {
        let Self::Full { k, v } = self else { unreachable!("state of another kind") };
        (k, v)
    }
}

/// Blocks of the pool: as many as `bounds` asks for, or as fit what is left on the GPU, beside the slots, of the share it
/// allows.
pub fn kv_blocks(exec: &mut Exec, config: &Config, bounds: StepBounds) -> Result<usize, LoadError> {
    let Some(share) = bounds.gpu_memory_share else { return Ok(bounds.kv_blocks) };
    let info = exec.gpu()?.info()?;
    let slots = (bounds.slots * config.slot_bytes()) as u64;
    let memory = DeviceMemory { total: info.memory as u64, free: (info.free as u64).saturating_sub(slots) };
    memory.blocks(share, config.block_bytes(), bounds.kv_blocks).map_err(LoadError::Option)
}

/// Allocates the state of every layer. On the CPU a page costs memory when it is first written.
pub fn allocate(exec: &mut Exec, config: &Config, blocks: usize, slots: usize) -> std::io::Result<Vec<LayerState>> {
    let [k, v] = config.shape.cache(exec.device(), blocks);
    let (states, tails) = (config.delta.states(slots), config.delta.tails(slots));
    let mut layer = |kind: &LayerKind| {
        Ok(match kind {
            LayerKind::Linear => LayerState::Linear {
                states: exec.tensor("state.memory", &states, DType::F32)?,
                tails: exec.tensor("state.tail", &tails, DType::Bf16)?,
            },
            LayerKind::Full => {
                LayerState::Full { k: exec.tensor("kv.k", &k, DType::Bf16)?, v: exec.tensor("kv.v", &v, DType::Bf16)? }
            }
        })
    };
    config.layers.iter().map(&mut layer).collect()
}
