//! `ops::attention`, as it was chosen, and csrc/attention/decode_async.cu: rows of few queries on GPUs without bulk
//! copies, their KV split over warps and blocks.

use super::abi::{CombineSplits, DecodeAsync};
use super::attention_decode::{Prefilled, decode_bulk};
use super::attention_operands::Operands;
use super::attention_prefill::prefill;
use crate::choice::{Attention, Decode, Prefill, async_partial_bytes};
use crate::limits::attention::DECODE_WARPS;
use crate::ops::{AttentionBatch, DECODE_QUERIES, HeadShape, KvDType};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

#[expect(clippy::too_many_arguments, reason = "the operands of the op")]
pub(crate) fn attention(
    exec: &mut Exec,
    choice: &Attention,
    q: &Tensor,
    (k, v): (&Tensor, &Tensor),
    batch: &AttentionBatch<'_>,
    shape: HeadShape,
    scale: f32,
    out: &mut Tensor,
) -> Result<(), OpError> {
    if !matches!(shape.head_dim, 64 | 128 | 256) {
        let message = format!("head_dim {}: the GPU kernels are built for 64, 128 and 256", shape.head_dim);
        return Err(OpError { op: "attention", message });
    }
    let operands = Operands { q, k, v, batch, shape, scale: scale * std::f32::consts::LOG2_E };
    if let Some(kernel) = &choice.prefill {
        prefill(exec, kernel, operands, out)?;
    }
    // Only the warpgroup kernel releases its successor after all kernels before it are complete.
    let prefilled = match choice.prefill {
        Some(Prefill::Wgmma { .. }) => Prefilled::Overlapped,
        Some(Prefill::Mma { .. }) | None => Prefilled::Serialised,
    };
    match &choice.decode {
        None => Ok(()),
        Some(Decode::Bulk(grid)) => decode_bulk(exec, grid, operands, prefilled, out),
        Some(Decode::Async { splits }) => decode_async(exec, *splits, operands, out),
    }
}

/// Rows of few queries in `splits` splits; a second kernel adds their partial results.
fn decode_async(exec: &mut Exec, splits: usize, operands: Operands<'_, '_>, out: &mut Tensor) -> Result<(), OpError> {
    let op = "attention";
    let Operands { q, k, v, batch, shape, scale } = operands;
    let HeadShape { heads, kv_heads, head_dim } = shape;
    let decode = match (KvDType::of(k), head_dim) {
        (KvDType::Bf16, 64) => DecodeAsync::decode_64,
        (KvDType::Bf16, 128) => DecodeAsync::decode_128,
        (KvDType::Bf16, _) => DecodeAsync::decode_256,
        (KvDType::Fp8, 64) => DecodeAsync::decode_fp8_64,
        (KvDType::Fp8, 128) => DecodeAsync::decode_fp8_128,
        (KvDType::Fp8, _) => DecodeAsync::decode_fp8_256,
    };
    let combine = match head_dim {
        64 => CombineSplits::combine_64,
        128 => CombineSplits::combine_128,
        _ => CombineSplits::combine_256,
    };
    let ((rows, max_blocks), blocks) = (batch.block_tables.rows_cols(), k.rows_cols().0);
    // Matrix rows of the longest row that the kernel supports.
    let max_rows = (batch.load.max_queries * shape.group()).min(DECODE_QUERIES);
    let gpu = exec.gpu()?;
    let workspace = gpu.workspace();
    let arguments = DecodeAsync {
        q,
        k,
        v,
        qo_indptr: batch.qo_indptr,
        kv_lens: batch.kv_lens,
        block_tables: batch.block_tables,
        out: &mut *out,
        heads,
        max_blocks,
        blocks,
        scale,
        partials: workspace,
        max_rows,
    };
    let launch = decode.launch(gpu, op, arguments)?;
    let launch = launch.shared(DECODE_WARPS * async_partial_bytes(max_rows, head_dim)).overlapped();
    // SAFETY: the op checked the shapes, the kernel checks the block ids, and the splits were chosen so that the
    // partial results fit the workspace.
    unsafe { launch.run([splits, kv_heads, rows], 32 * DECODE_WARPS)? };
    if splits > 1 {
        let arguments = CombineSplits { partials: workspace, qo_indptr: batch.qo_indptr, out, heads, splits };
        let launch = combine.launch(gpu, op, arguments)?.overlapped();
        // SAFETY: as above.
        unsafe { launch.run([max_rows, kv_heads, rows], head_dim)? };
    }
    Ok(())
}
