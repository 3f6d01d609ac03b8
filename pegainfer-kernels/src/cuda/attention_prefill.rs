//! `ops::attention` for rows of many queries: FlashAttention by wgmma on Hopper, by mma.sync elsewhere.

use super::attention_operands::Operands;
use super::images;
use crate::choice::Prefill;
use crate::ops::HeadShape;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// As in csrc/attention_prefill_wgmma.cu: a warpgroup that fetches and two that multiply.
const WGMMA_THREADS: usize = 3 * 128;
/// As in csrc/attention_prefill_mma.cu.
const MMA_WARPS: usize = 4;
const MMA_ROWS: usize = 16 * MMA_WARPS;

/// Bytes of `PrefillShared<D>` in csrc/attention_prefill_wgmma.cuh: KV tiles, tiles of queries, and less than a kilobyte of barriers.
fn wgmma_shared(head_dim: usize) -> usize {
    let (tiles, queries) = match head_dim {
        64 => (8 * 128, 2 * 128),
        128 => (5 * 128, 2 * 128),
        _ => (4 * 80, 128),
    };
    (tiles + queries) * head_dim * DType::Bf16.size() + 1024
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
    let gpu = exec.gpu()?;
    let launch = match (kernel, head_dim) {
        (Prefill::Wgmma { .. }, 64) => gpu.launch(op, &images::ATTENTION_PREFILL_WGMMA, "prefill_64"),
        (Prefill::Wgmma { .. }, 128) => gpu.launch(op, &images::ATTENTION_PREFILL_WGMMA, "prefill_128"),
        (Prefill::Wgmma { .. }, _) => gpu.launch(op, &images::ATTENTION_PREFILL_WGMMA, "prefill_256"),
        (Prefill::Mma, 64) => gpu.launch(op, &images::ATTENTION_PREFILL_MMA, "prefill_mma_64"),
        (Prefill::Mma, 128) => gpu.launch(op, &images::ATTENTION_PREFILL_MMA, "prefill_mma_128"),
        (Prefill::Mma, _) => gpu.launch(op, &images::ATTENTION_PREFILL_MMA, "prefill_mma_256"),
    };
    let launch = launch?.input(q).input(k).input(v);
    let launch = launch.input(batch.qo_indptr).input(batch.kv_lens).input(batch.block_tables).output(out).u32(heads);
    match kernel {
        Prefill::Wgmma { blocks: grid } => {
            let launch = launch.u32(kv_heads).u32(rows).u32(max_blocks).u32(blocks).f32(scale);
            // SAFETY: matches csrc/attention_prefill_wgmma.cu; the op checked the shapes, the kernel checks the block ids.
            unsafe { launch.shared(wgmma_shared(head_dim)).overlapped_late_release().run([*grid, 1, 1], WGMMA_THREADS) }
        }
        Prefill::Mma => {
            let grid = [(batch.load.max_queries * shape.group()).div_ceil(MMA_ROWS), kv_heads, rows];
            let launch = launch.u32(max_blocks).u32(blocks).f32(scale);
            // SAFETY: matches csrc/attention_prefill_mma.cu; as above.
            unsafe { launch.overlapped().run(grid, 32 * MMA_WARPS) }
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
