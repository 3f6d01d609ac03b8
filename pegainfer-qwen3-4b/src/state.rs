//! What a request leaves on the device between steps: its K and V, in the blocks of the pool.

use crate::config::Config;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, Tensor};

/// The paged cache of one layer; see `HeadShape::cache` for the layout.
#[derive(Debug)]
pub struct KvLayer {
    /// Keys.
    pub k: Tensor,
    /// Values.
    pub v: Tensor,
}

/// Allocates the cache of every layer. On the CPU a page costs memory when it is first written.
pub fn allocate_kv(exec: &mut Exec, config: &Config, blocks: usize) -> std::io::Result<Vec<KvLayer>> {
    let [k, v] = config.shape.cache(exec.device(), blocks);
    (0..config.layers)
        .map(|_| Ok(KvLayer { k: exec.tensor("kv.k", &k, DType::Bf16)?, v: exec.tensor("kv.v", &v, DType::Bf16)? }))
        .collect()
}
