//! What a request leaves on the device between steps: its K and V, in the blocks of the pool.

use crate::config::Config;
use crate::engine::LoadError;
use crate::executor::StepBounds;
use pegainfer_core::exec::Exec;
use pegainfer_core::kv::{BLOCK_SIZE, DeviceMemory};
use pegainfer_core::tensor::{DType, Tensor};

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
    blocks_that_fit(DeviceMemory { total: info.memory as u64, free: info.free as u64 }, share, config, bounds.kv_blocks)
}

/// At most `useful` blocks; an error if there is room for none.
fn blocks_that_fit(memory: DeviceMemory, share: f64, config: &Config, useful: usize) -> Result<usize, LoadError> {
    let block_bytes = (config.kv_bytes_per_token() * BLOCK_SIZE) as u64;
    match memory.left_of(share) / block_bytes {
        0 => Err(LoadError::Option(format!(
            "--gpu-memory-utilization {share} of the GPU's {:.1} GB leaves nothing for the KV cache: {:.1} GB are in use, \
             by this model or other programs; raise it, or lower --max-num-batched-tokens or --max-num-seqs",
            memory.total as f64 / 1e9,
            (memory.total - memory.free) as f64 / 1e9
        ))),
        fitting => Ok(usize::try_from(fitting).unwrap_or(useful).min(useful)),
    }
}

/// Allocates the cache of every layer. On the CPU a page costs memory when it is first written.
pub fn allocate_kv(exec: &mut Exec, config: &Config, blocks: usize) -> std::io::Result<Vec<KvLayer>> {
    let [k, v] = config.shape.cache(exec.device(), blocks);
    (0..config.layers)
        .map(|_| Ok(KvLayer { k: exec.tensor("kv.k", &k, DType::Bf16)?, v: exec.tensor("kv.v", &v, DType::Bf16)? }))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_pool_takes_what_is_left_but_no_more_than_is_useful() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/qwen3-tiny");
        let config = Config::load(&dir).unwrap();
        let block = (config.kv_bytes_per_token() * BLOCK_SIZE) as u64;
        let fit = |free, useful| {
            let memory = DeviceMemory { total: 1000 * block, free };
            blocks_that_fit(memory, 0.9, &config, useful)
        };
        assert_eq!(fit(1000 * block, 5000).unwrap(), 900);
        assert_eq!(fit(400 * block + block / 2, 5000).unwrap(), 300);
        assert_eq!(fit(400 * block, 64).unwrap(), 64);
        let error = fit(100 * block, 64).unwrap_err().to_string();
        assert!(error.contains("--gpu-memory-utilization 0.9") && !error.contains('\n'), "{error}");
    }
}
