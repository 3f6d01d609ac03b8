//! What a request leaves on the device between steps: its K and V, in the blocks of the pool.

use crate::config::Config;
use crate::engine::LoadError;
use crate::executor::StepBounds;
use pegainfer_core::exec::Exec;
use pegainfer_core::kv::DeviceMemory;
use pegainfer_core::tensor::{DType, Tensor};
use pegainfer_kernels::ops::BLOCK_SIZE;

/// The paged cache of one layer; see `HeadShape::cache` for the layout.
#[derive(Debug)]
pub struct KvLayer {
    /// Keys.
    pub k: Tensor,
    /// Values.
    pub v: Tensor,
}

/// Blocks of the pool: as many as `bounds` asks for, or as fit what is left on the GPU of the share it allows.
pub fn kv_blocks(exec: &mut Exec, config: &Config, bounds: StepBounds) -> Result<usize, LoadError> {
    let Some(share) = bounds.gpu_memory_share else { return Ok(bounds.kv_blocks) };
    let info = exec.gpu()?.info()?;
    let memory = DeviceMemory { total: info.memory as u64, free: info.free as u64 };
    let block_bytes = (config.kv_bytes_per_token() * BLOCK_SIZE) as u64;
    memory.blocks(share, block_bytes, bounds.kv_blocks).map_err(LoadError::Option)
}

/// Allocates the cache of every layer. On the CPU a page costs memory when it is first written.
pub fn allocate_kv(exec: &mut Exec, config: &Config, blocks: usize) -> std::io::Result<Vec<KvLayer>> {
    let [k, v] = config.shape.cache(exec.device(), blocks);
    (0..config.layers)
        .map(|_| Ok(KvLayer { k: exec.tensor("kv.k", &k, DType::Bf16)?, v: exec.tensor("kv.v", &v, DType::Bf16)? }))
        .collect()
}
