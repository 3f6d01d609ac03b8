//! `ops::attention` for rows of many queries: warpgroup products on Hopper, a warp's products elsewhere.

use super::images;
use crate::ops::{AttentionBatch, HeadShape};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// The only GPUs that run code for sm_90a.
pub(super) const HOPPER: (i32, i32) = (9, 0);
/// As in csrc/attention_prefill.cu: a warpgroup that fetches and two that multiply.
const HOPPER_THREADS: usize = 3 * 128;
/// As in csrc/attention_prefill.cuh: queries times heads of a group that are a tile.
const HOPPER_ROWS: usize = 128;
/// What an H200 does a second in prefill attention, and reads in decode attention.
const FLOPS: f64 = 5e14;
const BYTES: f64 = 4.2e12;
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

/// A step's attention as the division of the GPU sees it.
#[derive(Debug, Clone, Copy)]
struct Load {
    /// Of prefill, taken for equal.
    tiles: usize,
    /// Of prefill.
    flops: u64,
    /// Of the cache, read by decode attention.
    bytes: u64,
}

impl Load {
    fn of(batch: &AttentionBatch<'_>, tokens: usize, shape: HeadShape) -> Self {
        let HeadShape { heads, kv_heads, head_dim } = shape;
        let (decoding, context) = (batch.load.decode_rows, batch.load.decode_context);
        let prompts = (batch.block_tables.rows_cols().0 - decoding).max(1);
        // Each prompt ends within a tile.
        let row_tiles = ((tokens - decoding) * shape.group()).div_ceil(HOPPER_ROWS) + prompts - 1;
        Self {
            tiles: kv_heads * row_tiles.max(1),
            flops: 4 * batch.load.attended.saturating_sub(context) * (heads * head_dim) as u64,
            bytes: context * (2 * kv_heads * head_dim * DType::Bf16.size()) as u64,
        }
    }

    /// Blocks of the Hopper kernel: one on each multiprocessor, unless decode attention runs beside it. Prefill is bound by
    /// arithmetic, so its time goes with its share; decoding is bound by memory, which half of the multiprocessors keep
    /// busy. Of the shares in which every block has as many tiles, the one that ends first, whichever is last.
    fn blocks(self, multiprocessors: usize) -> usize {
        if self.bytes == 0 {
            return multiprocessors;
        }
        let tile = self.flops as f64 / self.tiles as f64 / FLOPS * multiprocessors as f64;
        let end = |rounds: usize| {
            let prefill = rounds as f64 * tile;
            let left = 1.0 - self.tiles.div_ceil(rounds) as f64 / multiprocessors as f64;
            let read = prefill * (2.0 * left).min(1.0);
            prefill + (self.bytes as f64 / BYTES - read).max(0.0)
        };
        let rounds = self.tiles.div_ceil(multiprocessors)..=self.tiles.div_ceil(multiprocessors / 2);
        let best = rounds.min_by(|&a, &b| end(a).total_cmp(&end(b)));
        best.map_or(multiprocessors, |rounds| self.tiles.div_ceil(rounds))
    }
}

/// How prefill stands to decode attention, if that is launched next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prefill {
    /// It is complete before the other begins, or there is none.
    Before,
    /// Both run together: it has released its successor only once all before it were complete, see csrc/decode.cuh.
    Beside,
}

/// Attention of the rows with more than 16 matrix rows (queries times heads of a group); the other rows of `out` stay as
/// they are. `scale` is for exp2; `decodes`: decode attention of those is launched next. The operands are those of
/// [`ops::attention`](crate::ops::attention), checked there.
#[expect(clippy::too_many_arguments, reason = "the operands of the op")]
pub(super) fn prefill(
    exec: &mut Exec,
    q: &Tensor,
    (k, v): (&Tensor, &Tensor),
    batch: &AttentionBatch<'_>,
    shape: HeadShape,
    scale: f32,
    decodes: bool,
    out: &mut Tensor,
) -> Result<Prefill, OpError> {
    let op = "attention";
    let HeadShape { heads, kv_heads, head_dim } = shape;
    let (rows, max_blocks) = batch.block_tables.rows_cols();
    let blocks = k.rows_cols().0;
    let gpu = exec.gpu()?;
    let hopper = gpu.capability() == HOPPER;
    let kernel = kernel(head_dim, hopper)?;
    if hopper {
        let grid = match decodes {
            true => Load::of(batch, q.rows_cols().0, shape).blocks(gpu.multiprocessors()),
            false => gpu.multiprocessors(),
        };
        let launch = gpu.launch(op, &images::ATTENTION_PREFILL, kernel)?.input(q).input(k).input(v);
        let launch = launch.input(batch.qo_indptr).input(batch.kv_lens).input(batch.block_tables).output(out);
        let launch = launch.u32(heads).u32(kv_heads).u32(rows).u32(max_blocks).u32(blocks).f32(scale);
        // SAFETY: matches csrc/attention_prefill.cu; the op checked the shapes, the kernel checks the block ids.
        unsafe { launch.shared(hopper_shared(head_dim)).overlapped().run([grid, 1, 1], HOPPER_THREADS)? };
        return Ok(Prefill::Beside);
    }
    let grid = [(batch.load.max_queries * shape.group()).div_ceil(MMA_ROWS), kv_heads, rows];
    let launch = gpu.launch(op, &images::ATTENTION_PREFILL_MMA, kernel)?.input(q).input(k).input(v);
    let launch = launch.input(batch.qo_indptr).input(batch.kv_lens).input(batch.block_tables).output(out);
    let launch = launch.u32(heads).u32(max_blocks).u32(blocks).f32(scale);
    // SAFETY: matches csrc/attention_prefill_mma.cu; as above.
    unsafe { launch.overlapped().run(grid, 32 * MMA_WARPS)? };
    Ok(Prefill::Before)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::AttentionLoad;

    #[test]
    fn the_shared_memory_fits_a_hopper_block() {
        for head_dim in [64, 128, 256] {
            assert!(hopper_shared(head_dim) <= 227 << 10, "head_dim {head_dim}");
        }
    }

    /// Of Qwen3-4B on an H200, for rows that decode, with the sum of their contexts, and prompts of so many tokens, the
    /// first of them after `after` cached ones.
    fn blocks(decoding: (usize, u64), prompts: &[u64], after: u64) -> usize {
        let mut exec = Exec::meta().unwrap();
        let shape = HeadShape { heads: 32, kv_heads: 8, head_dim: 128 };
        let rows = decoding.0 + prompts.len();
        let [indptr, lens] = [rows + 1, rows].map(|n| exec.tensor("rows", &[n], DType::U32).unwrap());
        let tokens: u64 = prompts.iter().sum();
        let attended = prompts[0] * after + prompts.iter().map(|n| n * (n + 1) / 2).sum::<u64>() + decoding.1;
        let (decode_rows, decode_context) = decoding;
        let load = AttentionLoad { attended, decode_rows, decode_context, ..AttentionLoad::default() };
        let batch = AttentionBatch {
            qo_indptr: &indptr,
            kv_lens: &lens,
            block_tables: &exec.tensor("tables", &[rows, 1], DType::U32).unwrap(),
            load,
        };
        Load::of(&batch, tokens as usize + decoding.0, shape).blocks(132)
    }

    #[test]
    fn prefill_leaves_multiprocessors_to_rows_that_decode() {
        let many = (40, 44_000);
        assert_eq!(blocks((0, 0), &[512], 0), 132, "nothing to leave them to");
        assert_eq!(blocks(many, &[472], 0), 60, "decoding takes longer: two tiles a block");
        assert_eq!(blocks(many, &[64], 448), 16, "no more than tiles");
        assert_eq!(blocks(many, &[1000, 1000], 0), 86, "both end together");
        assert_eq!(blocks((1, 1100), &[511], 0), 128, "decoding is nothing beside a second round");
        assert_eq!(blocks(many, &[472], 4096), 120, "nor is it much beside one of long tiles");
        assert!(blocks((100, 1_000_000), &[1, 2, 3], 0) <= 132);
    }
}
