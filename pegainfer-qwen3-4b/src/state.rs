//! What a request leaves on the device between steps: its K and V, in the blocks of the pool.

use crate::config::Config;
use pegainfer_core::exec::Exec;
use pegainfer_core::kv::BLOCK_SIZE;
use pegainfer_core::tensor::{DType, Tensor};

/// The paged cache of one layer; see `ops::qk_norm_rope_write_kv` for the layout.
#[derive(Debug)]
pub struct KvLayer {
    /// `[blocks, kv_heads, head_dim, BLOCK_SIZE]`.
    pub k: Tensor,
    /// `[blocks, kv_heads, BLOCK_SIZE, head_dim]`.
    pub v: Tensor,
}

/// Allocates the cache of every layer. On the CPU a page costs memory when it is first written.
pub fn allocate_kv(exec: &mut Exec, config: &Config, blocks: usize) -> std::io::Result<Vec<KvLayer>> {
    let (heads, dim) = (config.shape.kv_heads, config.shape.head_dim);
    (0..config.layers)
        .map(|_| {
            Ok(KvLayer {
                k: exec.tensor("kv.k", &[blocks, heads, dim, BLOCK_SIZE], DType::Bf16)?,
                v: exec.tensor("kv.v", &[blocks, heads, BLOCK_SIZE, dim], DType::Bf16)?,
            })
        })
        .collect()
}
