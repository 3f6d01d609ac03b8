//! `ops::attention`: rows of few queries split their KV over warps and blocks, unless `attention_decode` takes them; for
//! the others see `attention_prefill`.

use super::attention_prefill::{self, Prefill};
use super::{attention_decode, images};
use crate::heads::BLOCK_SIZE;
use crate::ops::{AttentionBatch, DECODE_QUERIES, HeadShape};
use pegainfer_core::cuda::WORKSPACE_BYTES;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// As in csrc/attention.cu: queries times heads of a group that one warp takes.
const MATRIX_ROWS: usize = DECODE_QUERIES;
const WARPS: usize = 4;
/// Blocks of threads that a multiprocessor should have: two fit, by registers.
const OCCUPANCY: usize = 2;
/// KV blocks that make a split worth its part of the sum: one for each warp.
const MIN_SHARE: usize = WARPS;

/// Kernels of one head size: decode, combine.
fn kernels(head_dim: usize) -> Result<[&'static str; 2], OpError> {
    match head_dim {
        64 => Ok(["decode_64", "combine_64"]),
        128 => Ok(["decode_128", "combine_128"]),
        256 => Ok(["decode_256", "combine_256"]),
        _ => Err(OpError {
            op: "attention",
            message: format!("head_dim {head_dim}: the GPU kernels are built for 64, 128 and 256"),
        }),
    }
}

/// Bytes of a warp's part, or a split's: numerators, maximum and sum of `rows` matrix rows.
fn part_bytes(rows: usize, head_dim: usize) -> usize {
    rows * (head_dim + 2) * size_of::<f32>()
}

/// Splits of each (row, KV head), chosen by how many blocks of threads fill the GPU, never by the context alone.
fn splits(multiprocessors: usize, pairs: usize, kv_blocks: usize, part_bytes: usize) -> usize {
    let wanted = (OCCUPANCY * multiprocessors).div_ceil(pairs).min(kv_blocks.div_ceil(MIN_SHARE));
    let room = WORKSPACE_BYTES / (pairs * part_bytes);
    wanted.min(room).max(1)
}

pub(crate) fn attention(
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
    let group = heads / kv_heads;
    let [decode, combine] = kernels(head_dim)?;
    let (rows, max_blocks) = batch.block_tables.rows_cols();
    let blocks = k.rows_cols().0;
    // exp2 instead of exp.
    let scale = scale * std::f32::consts::LOG2_E;
    let (few, most) = (batch.load.min_queries * group <= MATRIX_ROWS, batch.load.max_queries * group);
    let prefill = match most > MATRIX_ROWS {
        true => attention_prefill::prefill(exec, q, (k, v), batch, shape, scale, few, out)?,
        false => Prefill::Before,
    };
    if !few {
        return Ok(());
    }
    let gpu = exec.gpu()?;
    if attention_decode::available(gpu, shape) {
        return attention_decode::decode(gpu, q, (k, v), batch, shape, scale, prefill, out);
    }
    // Matrix rows of the longest row that `decode` takes.
    let max_rows = most.min(MATRIX_ROWS);
    let part_bytes = part_bytes(max_rows, head_dim);
    let kv_blocks = batch.load.max_context.div_ceil(BLOCK_SIZE);
    let splits = splits(gpu.multiprocessors(), rows * kv_heads, kv_blocks, part_bytes);
    let workspace = gpu.workspace();
    let launch = gpu.launch(op, &images::ATTENTION, decode)?.input(q).input(k).input(v);
    let launch = launch.input(batch.qo_indptr).input(batch.kv_lens).input(batch.block_tables).output(out);
    let launch = launch.u32(heads).u32(max_blocks).u32(blocks).f32(scale).pointer(workspace).u32(max_rows);
    // SAFETY: as above; `splits` was chosen so that the parts fit the workspace.
    unsafe { launch.shared(WARPS * part_bytes).overlapped().run([splits, kv_heads, rows], 32 * WARPS)? };
    if splits > 1 {
        let launch = gpu.launch(op, &images::ATTENTION, combine)?.pointer(workspace).input(batch.qo_indptr);
        // SAFETY: as above.
        unsafe { launch.output(out).u32(heads).u32(splits).overlapped().run([max_rows, kv_heads, rows], head_dim)? };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_large_heads_fit_every_gpu() {
        // Compute capability 8.6, 8.9 and 12.0 give a block 99 KB.
        assert!(WARPS * part_bytes(MATRIX_ROWS, 256) <= 99 << 10);
    }

    #[test]
    fn splits_fill_the_gpu_and_fit_the_workspace() {
        let part = 4 * 130 * 4;
        assert_eq!(splits(132, 8, 64, part), 16, "one stream at 1k: one KV block a warp");
        assert_eq!(splits(132, 8, 4096, part), 33, "one stream at 64k: as many as fill the GPU");
        assert_eq!(splits(132, 64 * 8, 4096, part), 1, "many streams fill it without splits");
        assert_eq!(splits(132, 8, 1, part), 1);
        assert!(splits(100_000, 100, 100_000, 16 * part) * 100 * 16 * part <= WORKSPACE_BYTES);
    }
}
