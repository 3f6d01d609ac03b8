//! `ops::attention` for rows of many queries: FlashAttention by wgmma on Hopper, by mma.sync elsewhere.

use super::abi::{PrefillMma, PrefillWgmma, PrefillWidened, WidenKv};
use super::attention_operands::Operands;
use super::fp8::padded_rows;
use crate::choice::{Prefill, Widening};
use crate::heads::BLOCK_SIZE;
use crate::limits::attention::LARGE_HEAD;
use crate::limits::{prefill_mma, prefill_wgmma, widen_kv};
use crate::ops::{AttentionBatch, HeadShape, KvDType};
use pegainfer_core::cuda::Cuda;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

const WGMMA_THREADS: usize = (1 + prefill_wgmma::CONSUMERS) * prefill_wgmma::WARPGROUP;

/// Bytes of shared memory of the kernel by wgmma.
fn wgmma_shared(head_dim: usize) -> usize {
    match head_dim {
        64 => prefill_wgmma::SHARED_64,
        128 => prefill_wgmma::SHARED_128,
        _ => prefill_wgmma::SHARED_256,
    }
}

/// Threads of a block of the kernel by mma.sync: a warp for each 32 rows of a tile, for each 16 of large heads.
fn mma_threads(head_dim: usize) -> usize {
    if head_dim > LARGE_HEAD { 2 * prefill_mma::ROWS } else { prefill_mma::ROWS }
}

/// Bytes of its shared memory: queries, unless they are in registers, keys and values; of a cache in FP8 also codes and
/// scales.
fn mma_shared(head_dim: usize, format: KvDType) -> usize {
    let (rows, tokens) = (prefill_mma::ROWS, prefill_mma::TOKENS);
    let queries = if head_dim > LARGE_HEAD { 0 } else { rows * head_dim * DType::Bf16.size() };
    let codes = if format == KvDType::Fp8 { tokens * (head_dim + 2 * size_of::<f32>()) } else { 0 };
    queries + 2 * tokens * head_dim * DType::Bf16.size() + codes
}

/// Attention of the rows with more than 16 matrix rows (queries times heads of a group); the other rows of `out` stay
/// as they are.
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
        Prefill::Wgmma { blocks, widening: Some(widening) } => prefill_widened(gpu, (*blocks, widening), operands, out),
        Prefill::Wgmma { blocks: grid, widening: None } => {
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
                padded: padded_rows(out),
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
        Prefill::Mma { blocks: grid } => {
            let kernel = match (KvDType::of(k), head_dim) {
                (KvDType::Bf16, 64) => PrefillMma::prefill_mma_64,
                (KvDType::Bf16, 128) => PrefillMma::prefill_mma_128,
                (KvDType::Bf16, _) => PrefillMma::prefill_mma_256,
                (KvDType::Fp8, 64) => PrefillMma::prefill_mma_fp8_64,
                (KvDType::Fp8, 128) => PrefillMma::prefill_mma_fp8_128,
                (KvDType::Fp8, _) => PrefillMma::prefill_mma_fp8_256,
            };
            let arguments = PrefillMma {
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
            let launch = kernel.launch(gpu, op, arguments)?.shared(mma_shared(head_dim, KvDType::of(k)));
            // SAFETY: as above.
            unsafe { launch.overlapped().run([*grid, 1, 1], mma_threads(head_dim)) }
        }
    }
}

/// Widens the keys and values of some KV heads at a time in the workspace, then attends.
fn prefill_widened(
    gpu: &mut Cuda,
    (grid, widening): (usize, &Widening),
    operands: Operands<'_, '_>,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let op = "attention";
    let Operands { q, k, v, batch, shape, scale } = operands;
    let HeadShape { heads, kv_heads, head_dim } = shape;
    let ((rows, max_blocks), blocks) = (batch.block_tables.rows_cols(), k.rows_cols().0);
    let AttentionBatch { qo_indptr, kv_lens, block_tables, .. } = *batch;
    let (widen, attend) = match head_dim {
        64 => (WidenKv::widen_kv_64, PrefillWidened::prefill_widened_64),
        128 => (WidenKv::widen_kv_128, PrefillWidened::prefill_widened_128),
        _ => (WidenKv::widen_kv_256, PrefillWidened::prefill_widened_256),
    };
    let capacity = widening.kv_blocks;
    let wide_k = gpu.workspace() + widening.first_byte as u64;
    let wide_v = wide_k + (capacity * widening.kv_heads * BLOCK_SIZE * head_dim * DType::Bf16.size()) as u64;
    for first_head in (0..kv_heads).step_by(widening.kv_heads) {
        let heads_here = widening.kv_heads.min(kv_heads - first_head);
        let arguments = WidenKv {
            k,
            v,
            qo_indptr,
            kv_lens,
            block_tables,
            out_k: wide_k,
            out_v: wide_v,
            heads,
            kv_heads,
            rows,
            max_blocks,
            blocks,
            first_head,
            heads_here,
            capacity,
        };
        let launch = widen.launch(gpu, op, arguments)?.overlapped();
        let warps = capacity * heads_here;
        // SAFETY: the choice checked that the KV blocks fit the workspace; the kernel checks the block ids.
        unsafe { launch.run([(32 * warps).div_ceil(widen_kv::THREADS), 1, 1], widen_kv::THREADS)? };
        let arguments = PrefillWidened {
            q,
            k: wide_k,
            v: wide_v,
            qo_indptr,
            kv_lens,
            padded: padded_rows(out),
            out: &mut *out,
            heads,
            kv_heads,
            rows,
            first_head,
            heads_here,
            capacity,
            scale,
        };
        let launch = attend.launch(gpu, op, arguments)?.shared(wgmma_shared(head_dim)).overlapped_late_release();
        // SAFETY: the op checked the shapes; the previous kernel has widened the inputs.
        unsafe { launch.run([grid, 1, 1], WGMMA_THREADS)? };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::Gpu;

    #[test]
    fn shared_memory_fits_every_card() {
        for (head_dim, format) in [64, 128, 256].iter().flat_map(|dim| [(*dim, KvDType::Bf16), (*dim, KvDType::Fp8)]) {
            let least = Gpu::named("L4").unwrap().shared_memory;
            assert!(mma_shared(head_dim, format) <= least, "head_dim {head_dim}, {format:?}");
        }
    }

    #[test]
    fn the_shared_memory_fits_a_hopper_block() {
        for head_dim in [64, 128, 256] {
            assert!(wgmma_shared(head_dim) <= Gpu::PLANNED.shared_memory, "head_dim {head_dim}");
        }
    }
}
