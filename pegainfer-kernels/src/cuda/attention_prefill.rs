//! `ops::attention` for rows of many queries: warpgroup products on Hopper, a warp's products elsewhere.

use super::images;
use crate::ops::{AttentionBatch, HeadShape};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// The only GPUs that run code for sm_90a.
const HOPPER: (i32, i32) = (9, 0);
/// As in csrc/attention_prefill.cu: a warpgroup that fetches and two that multiply.
const HOPPER_THREADS: usize = 3 * 128;
/// As in csrc/attention_prefill_mma.cu.
const MMA_WARPS: usize = 4;
const MMA_ROWS: usize = 16 * MMA_WARPS;

/// Kernel of one head size, on Hopper or elsewhere.
fn kernel(head_dim: usize, hopper: bool) -> Result<&'static str, OpError> {
    match (head_dim, hopper) {
        (64, true) => Ok("prefill_64"),
        (128, true) => Ok("prefill_128"),
        (256, true) => Ok("prefill_256"),
        (64, false) => Ok("prefill_mma_64"),
        (128, false) => Ok("prefill_mma_128"),
        (256, false) => Ok("prefill_mma_256"),
        _ => Err(OpError {
            op: "attention",
            message: format!("head_dim {head_dim}: the GPU kernels are built for 64, 128 and 256"),
        }),
    }
}

/// Bytes of `Shared<D>` in csrc/attention_prefill.cuh: KV tiles, tiles of queries, and less than a kilobyte of barriers.
fn hopper_shared(head_dim: usize) -> usize {
    let (tiles, queries) = match head_dim {
        64 => (8 * 128, 2 * 128),
        128 => (5 * 128, 2 * 128),
        _ => (4 * 80, 128),
    };
    (tiles + queries) * head_dim * DType::Bf16.size() + 1024
}

/// Attention of the rows with more than 16 matrix rows (queries times heads of a group); the other rows of `out` stay as
/// they are. `scale` is for exp2; the operands are those of [`ops::attention`](crate::ops::attention), checked there.
pub(super) fn prefill(
    exec: &mut Exec,
    q: &Tensor,
    (k, v): (&Tensor, &Tensor),
    batch: &AttentionBatch<'_>,
    shape: HeadShape,
    scale: f32,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let op = "attention";
    let HeadShape { heads, kv_heads, head_dim } = shape;
    let (rows, max_blocks) = batch.block_tables.rows_cols();
    let blocks = k.rows_cols().0;
    let gpu = exec.gpu()?;
    let hopper = gpu.capability() == HOPPER;
    let kernel = kernel(head_dim, hopper)?;
    if hopper {
        let grid = [gpu.multiprocessors(), 1, 1];
        let launch = gpu.launch(op, &images::ATTENTION_PREFILL, kernel)?.input(q).input(k).input(v);
        let launch = launch.input(batch.qo_indptr).input(batch.kv_lens).input(batch.block_tables).output(out);
        let launch = launch.u32(heads).u32(kv_heads).u32(rows).u32(max_blocks).u32(blocks).f32(scale);
        // SAFETY: matches csrc/attention_prefill.cu; the op checked the shapes, the kernel checks the block ids.
        return unsafe { launch.shared(hopper_shared(head_dim)).overlapped().run(grid, HOPPER_THREADS) };
    }
    let grid = [(batch.queries.1 * shape.group()).div_ceil(MMA_ROWS), kv_heads, rows];
    let launch = gpu.launch(op, &images::ATTENTION_PREFILL_MMA, kernel)?.input(q).input(k).input(v);
    let launch = launch.input(batch.qo_indptr).input(batch.kv_lens).input(batch.block_tables).output(out);
    let launch = launch.u32(heads).u32(max_blocks).u32(blocks).f32(scale);
    // SAFETY: matches csrc/attention_prefill_mma.cu; as above.
    unsafe { launch.overlapped().run(grid, 32 * MMA_WARPS) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shared_memory_fits_a_hopper_block() {
        for head_dim in [64, 128, 256] {
            assert!(hopper_shared(head_dim) <= 227 << 10, "head_dim {head_dim}");
        }
    }
}
