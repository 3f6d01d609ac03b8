//! `ops::attention` for rows of many queries: FlashAttention by wgmma on Hopper, by mma.sync elsewhere.

use super::abi::{PrefillMma, PrefillWgmma};
use super::attention_operands::Operands;
use crate::choice::Prefill;
use crate::limits::prefill_mma::{WARP_ROWS, WARPS};
use crate::limits::prefill_wgmma;
use crate::ops::{AttentionBatch, HeadShape, KvDType};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

const WGMMA_THREADS: usize = (1 + prefill_wgmma::CONSUMERS) * prefill_wgmma::WARPGROUP;
const MMA_ROWS: usize = WARP_ROWS * WARPS;

/// Bytes of shared memory of the kernel by wgmma.
fn wgmma_shared(head_dim: usize) -> usize {
    match head_dim {
        64 => prefill_wgmma::SHARED_64,
        128 => prefill_wgmma::SHARED_128,
        _ => prefill_wgmma::SHARED_256,
    }
}

/// Attention of the rows with more than 16 matrix rows (queries times heads of a group); the other rows of `out` stay as
/// they are.
pub(super) fn prefill(
    exec: &mut Exec,
    kernel: &Prefill,
    operands: Operands<'_, '_>,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let op = "attention";
    let Operands { q, k, v, batch, shape, scale } = operands;
    let HeadShape { heads, kv_heads, head_dim } = shape;
    let ((rows, max_blocks), blocks) = (batch.block_tables.rows_cols(), k.rows_cols().0);
    let AttentionBatch { qo_indptr, kv_lens, block_tables, .. } = *batch;
    let gpu = exec.gpu()?;
    match kernel {
        Prefill::Wgmma { blocks: grid } => {
            let kernel = match head_dim {
                64 => PrefillWgmma::prefill_64,
                128 => PrefillWgmma::prefill_128,
                _ => PrefillWgmma::prefill_256,
            };
            let arguments = PrefillWgmma {
                q,
                k,
                v,
                qo_indptr,
                kv_lens,
                block_tables,
                out,
                heads,
                kv_heads,
                rows,
                max_blocks,
                blocks,
                scale,
            };
            let launch = kernel.launch(gpu, op, arguments)?;
            // SAFETY: the op checked the shapes, the kernel checks the block ids.
            unsafe { launch.shared(wgmma_shared(head_dim)).overlapped_late_release().run([*grid, 1, 1], WGMMA_THREADS) }
        }
        Prefill::Mma => {
            let kernel = match (KvDType::of(k), head_dim) {
                (KvDType::Bf16, 64) => PrefillMma::prefill_mma_64,
                (KvDType::Bf16, 128) => PrefillMma::prefill_mma_128,
                (KvDType::Bf16, _) => PrefillMma::prefill_mma_256,
                (KvDType::Fp8, 64) => PrefillMma::prefill_mma_fp8_64,
                (KvDType::Fp8, 128) => PrefillMma::prefill_mma_fp8_128,
                (KvDType::Fp8, _) => PrefillMma::prefill_mma_fp8_256,
            };
            let grid = [(batch.load.max_queries * shape.group()).div_ceil(MMA_ROWS), kv_heads, rows];
            let arguments =
                PrefillMma { q, k, v, qo_indptr, kv_lens, block_tables, out, heads, max_blocks, blocks, scale };
            let launch = kernel.launch(gpu, op, arguments)?;
            // SAFETY: as above.
            unsafe { launch.overlapped().run(grid, 32 * WARPS) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::Gpu;

    #[test]
    fn the_shared_memory_fits_a_hopper_block() {
        for head_dim in [64, 128, 256] {
            assert!(wgmma_shared(head_dim) <= Gpu::PLANNED.shared_memory, "head_dim {head_dim}");
        }
    }
}
