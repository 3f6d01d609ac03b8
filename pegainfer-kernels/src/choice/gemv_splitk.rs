//! The grid of csrc/gemm/gemv_splitk.cu: GEMMs of few rows of x, which read weights once.

use super::gemm_shape::{GemmShape, Output};
use super::gpu::Gpu;
use crate::limits::gemv_splitk::{self as limits, MAX_WARPS, STEP};

/// Maximum number of rows of x: from about 20 on, cuBLASLt is faster (a decode step of 32 rows of Qwen3-4B on an H200
/// by 0.2 of 4.6 ms).
const MAX_ROWS: usize = 16;

/// Bytes of a warp's ring of weights: 16 rows of each step.
const RING_BYTES: usize = 16 * limits::RING * STEP * 2;
/// Columns of a chunk of x.
const CHUNK: usize = limits::CHUNK * STEP;
/// Bytes of a chunk, for eight rows of x.
const CHUNK_BYTES: usize = 8 * CHUNK * 2;
/// Minimum number of chunks of x that must fit if not all of them do.
const MIN_SLOTS: usize = 3;
/// Rows of w per block whose copies keep the memory busy.
const BUSY_ROWS: usize = 72;
/// Number of columns below which a split is not worth adding its sums.
const MIN_SPLIT: usize = 4 * STEP;
const MAX_SPLITS: usize = 8;

/// Distribution of a GEMM over the GPU: a block for each multiprocessor and split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemvPlan {
    /// Splits of the columns.
    pub splits: usize,
    /// Columns of a split.
    pub split_columns: usize,
    /// Blocks of a split.
    pub blocks: usize,
    /// Warps of a block.
    pub warps: usize,
    /// Chunks of x in shared memory.
    pub slots: usize,
    /// Bytes of shared memory.
    pub shared: usize,
}

/// True if the kernel supports `m` rows of x.
pub(super) fn supports(m: usize) -> bool {
    m <= MAX_ROWS
}

/// Tiles of 8 rows of x that a kernel takes: 1 or 2.
pub(crate) fn tiles(m: usize) -> usize {
    m.div_ceil(8).next_power_of_two()
}

/// Spreads the rows of w so that every multiprocessor has one block, all blocks have equal shares, and warps take whole
/// tiles of rows if possible.
pub(super) fn plan(gpu: &Gpu, GemmShape { m, n, k, output, .. }: GemmShape) -> GemvPlan {
    let &Gpu { multiprocessors, shared_memory: shared, .. } = gpu;
    let (rows, tile) = if output == Output::Gated { (n / 2, 8) } else { (n, 16) };
    let enough = |splits: &usize| n * splits >= BUSY_ROWS * multiprocessors || k / (splits + 1) < MIN_SPLIT;
    let splits = match output {
        Output::SplitK => (1..MAX_SPLITS).find(enough).unwrap_or(MAX_SPLITS),
        _ => 1,
    };
    let split_columns = k.div_ceil(STEP).div_ceil(splits) * STEP;
    let splits = k.div_ceil(split_columns);
    let blocks = (multiprocessors / splits).clamp(1, rows.div_ceil(tile));
    let each = rows.div_ceil(blocks);
    let (chunks, chunk_bytes) = (split_columns.div_ceil(CHUNK), CHUNK_BYTES * tiles(m));
    // Fewer warps if shared memory is small.
    let rings = shared.saturating_sub(MIN_SLOTS.min(chunks) * chunk_bytes) / RING_BYTES;
    let most = MAX_WARPS.min(rings).max(1);
    let warps = each.div_ceil(tile * each.div_ceil(tile * most)).max(4.min(most));
    let slots = chunks.min((shared.saturating_sub(warps * RING_BYTES)) / chunk_bytes);
    // More than half, so that a multiprocessor holds one block: see csrc/gemm/gemv_splitk.cu.
    let shared = (warps * RING_BYTES + slots * chunk_bytes).max(shared / 2 + 1024);
    GemvPlan { splits, split_columns, blocks, warps, slots, shared }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::WeightFormat;

    #[test]
    fn a_qwen3_4b_layer_fills_an_h200() {
        let of = |n, k, output| {
            let p = plan(&Gpu::PLANNED, GemmShape { m: 1, n, k, output, format: WeightFormat::Bf16 });
            (p.splits, p.blocks, p.warps)
        };
        assert_eq!(of(6144, 2560, Output::Bf16), (1, 132, 4));
        assert_eq!(of(2560, 4096, Output::SplitK), (4, 33, 5));
        assert_eq!(of(19456, 2560, Output::Gated), (1, 132, 10));
        assert_eq!(of(2560, 9728, Output::SplitK), (4, 33, 5));
        assert_eq!(of(151_936, 2560, Output::F32), (1, 132, 12));
    }

    #[test]
    fn splits_cover_the_columns_and_everything_fits() {
        let small = Gpu { multiprocessors: 20, ..Gpu::named("L4").unwrap() };
        for gpu in
            ["H200", "A100", "L4", "RTX 4090", "RTX 5090"].map(|name| Gpu::named(name).unwrap()).iter().chain([&small])
        {
            for (n, k) in [(2560, 4096), (16, 96), (1024, 3072), (1024, 128), (5120, 17_408), (256, 64)] {
                for m in 1..=MAX_ROWS {
                    for output in [Output::Bf16, Output::SplitK, Output::Gated] {
                        let p = plan(gpu, GemmShape { m, n, k, output, format: WeightFormat::Bf16 });
                        assert!(p.splits * p.split_columns >= k && (p.splits - 1) * p.split_columns < k, "{p:?}");
                        assert!(p.shared <= gpu.shared_memory && p.warps >= 1 && p.warps <= MAX_WARPS, "{p:?}");
                        assert!(p.slots >= MIN_SLOTS.min(p.split_columns.div_ceil(CHUNK)), "{p:?}");
                        assert!(p.warps * RING_BYTES + p.slots * CHUNK_BYTES * tiles(m) <= p.shared, "{p:?}");
                    }
                }
            }
        }
    }
}
