//! The grid of csrc/gemm/skinny_wgmma.cu and csrc/gemm/skinny_wgmma_fp8.cu: GEMMs of up to about a hundred rows of x on Hopper's
//! warpgroups.

use super::gemm_shape::{GemmShape, Output, WeightFormat};
use super::gpu::Gpu;
use crate::limits::fp8::BLOCK;
use crate::limits::skinny_wgmma::{BOXES, MAX_WARPGROUPS};
use pegainfer_core::cuda::BOX_COLUMNS;

/// Maximum number of rows of x: up to here the kernel is faster than cuBLASLt; see docs/benchmarks/h200-kernels.md.
const MAX_ROWS: usize = 96;

/// Rows of a tile of w: those of one wgmma.
const TILE_ROWS: usize = 64;
/// Bytes of a step's columns of a row.
const ROW_BYTES: usize = BOXES * BOX_COLUMNS * 2;
/// Maximum number of rows of x with FP8 weights: above, cuBLASLt is faster.
const FP8_MAX_ROWS: usize = 64;
/// Maximum with split-K, for weights with so few rows that cuBLASLt's tiles do not fill the GPU.
const FP8_MAX_SPLIT_ROWS: usize = 128;
/// Bytes of the two barriers of a slot.
const BARRIER_BYTES: usize = 16;
/// Bytes of weights in flight in a block.
const RING_BYTES: usize = 112 << 10;
/// Bytes of x, for up to 32, 64, 96 and 128 rows.
const INPUT_RING_BYTES: [usize; 4] = [64 << 10, 96 << 10, 96 << 10, 96 << 10];
/// Number of columns below which a split is not worth adding its sums.
const MIN_SPLIT: usize = 512;
const MAX_SPLITS: usize = 8;

/// Distribution of a GEMM over the GPU, as parameters of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SkinnyPlan {
    /// Splits of the columns.
    pub splits: usize,
    /// Columns of a split.
    pub split_columns: usize,
    /// Blocks of a split.
    pub blocks: usize,
    /// Warpgroups of a block that multiply.
    pub warpgroups: usize,
    /// Passes over the columns.
    pub passes: usize,
    /// Rows of w of a tile.
    pub rows: usize,
    /// Steps of w in shared memory.
    pub slots: usize,
    /// Steps of x in shared memory.
    pub input_slots: usize,
    /// Bytes of shared memory.
    pub shared: usize,
}

/// True if `gpu` runs the kernel for this shape.
pub(super) fn supports(gpu: &Gpu, GemmShape { m, n, k, output, format }: GemmShape) -> bool {
    // A tile of one warpgroup in each block.
    let splits = output == Output::SplitK && n <= gpu.multiprocessors * TILE_ROWS;
    let most = match format {
        WeightFormat::Bf16 => MAX_ROWS,
        WeightFormat::Fp8 if k.is_multiple_of(BLOCK) && splits => FP8_MAX_SPLIT_ROWS,
        WeightFormat::Fp8 if k.is_multiple_of(BLOCK) => FP8_MAX_ROWS,
        _ => 0,
    };
    gpu.is_hopper() && (1..=most).contains(&m)
}

/// Index of the kernel for `m` rows of x in a list of those for 32, 64, 96 and 128.
pub(crate) fn width(m: usize) -> usize {
    m.div_ceil(32) - 1
}

/// Columns of a step.
fn step(format: WeightFormat) -> usize {
    if format == WeightFormat::Fp8 { ROW_BYTES } else { ROW_BYTES / 2 }
}

/// Number of tiles that a warpgroup sums at once; more tiles read x less often if there are many.
fn tiles(m: usize, output: Output, format: WeightFormat) -> usize {
    match output {
        _ if format == WeightFormat::Fp8 && output != Output::Gated => 1,
        Output::Bf16 | Output::SplitK => 1,
        Output::Gated => 2,
        Output::F32 => [4, 2, 2][width(m)],
    }
}

/// Deals the rows of w to blocks in even shares, and each share to warpgroups in even tiles.
pub(super) fn plan(gpu: &Gpu, GemmShape { m, n, k, output, format }: GemmShape) -> SkinnyPlan {
    let multiprocessors = gpu.multiprocessors;
    let rows = if output == Output::Gated { n / 2 } else { n };
    let splits = match output {
        // As many splits as leave each block one tile.
        Output::SplitK => (multiprocessors * TILE_ROWS / n).min(k / MIN_SPLIT).clamp(1, MAX_SPLITS),
        _ => 1,
    };
    let step = step(format);
    let split_columns = k.div_ceil(step).div_ceil(splits) * step;
    let splits = k.div_ceil(split_columns);
    let blocks = (multiprocessors / splits).clamp(1, rows.div_ceil(8));
    // Tiles of logits begin at whole vectors of 32 bytes.
    let unit = if output == Output::F32 { 8 } else { 1 };
    let share = rows.div_ceil(unit).div_ceil(blocks) * unit;
    // A gated tile has its two halves in two sums of the same warpgroup.
    let each = if output == Output::Gated { 1 } else { tiles(m, output, format) };
    let wanted = share.div_ceil(TILE_ROWS);
    let warpgroups = wanted.div_ceil(each).min(MAX_WARPGROUPS);
    let passes = wanted.div_ceil(each * warpgroups);
    let rows = share.div_ceil(each * warpgroups * passes).next_multiple_of(unit);
    let width_rows = 32 * (width(m) + 1);
    let (slot, input_slot) = (rows.next_multiple_of(8) * ROW_BYTES, width_rows * ROW_BYTES);
    let scale_bytes = if format == WeightFormat::Fp8 { BOXES * width_rows * size_of::<f32>() } else { 0 };
    // A slot always belongs to the same warpgroup; another one would pass a barrier of which it missed a round.
    let (slots, input_slots) = (RING_BYTES / slot / warpgroups * warpgroups, INPUT_RING_BYTES[width(m)] / input_slot);
    let shared = slots * slot + input_slots * (input_slot + scale_bytes) + (slots + input_slots) * BARRIER_BYTES;
    SkinnyPlan { splits, split_columns, blocks, warpgroups, passes, rows, slots, input_slots, shared }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Gpu = Gpu::PLANNED;

    #[test]
    fn a_qwen3_4b_layer_fills_an_h200() {
        let of = |n, k, output| {
            let p = plan(&H200, GemmShape { m: 64, n, k, output, format: WeightFormat::Bf16 });
            (p.splits, p.blocks, p.warpgroups, p.passes, p.rows)
        };
        assert_eq!(of(6144, 2560, Output::Bf16), (1, 132, 1, 1, 47));
        assert_eq!(of(2560, 4096, Output::SplitK), (3, 44, 1, 1, 59));
        assert_eq!(of(19456, 2560, Output::Gated), (1, 132, 2, 1, 37));
        assert_eq!(of(2560, 9728, Output::SplitK), (3, 44, 1, 1, 59));
        assert_eq!(of(12_352, 2560, Output::Bf16), (1, 132, 2, 1, 47));
    }

    #[test]
    fn everything_is_covered_and_fits() {
        let shapes =
            [(2560, 4096), (16, 96), (1024, 3072), (320, 896), (5120, 17_408), (8, 8), (151_936, 2560), (248, 64)];
        let formats = [(WeightFormat::Bf16, MAX_ROWS), (WeightFormat::Fp8, FP8_MAX_ROWS)];
        for ((n, k), (format, most)) in shapes.into_iter().flat_map(|shape| formats.map(|format| (shape, format))) {
            for m in 1..=most {
                for output in [Output::Bf16, Output::F32, Output::SplitK, Output::Gated] {
                    let p = plan(&H200, GemmShape { m, n, k, output, format });
                    assert!(p.splits * p.split_columns >= k && (p.splits - 1) * p.split_columns < k, "{p:?}");
                    let (rows, each) = if output == Output::Gated { (n / 2, 1) } else { (n, tiles(m, output, format)) };
                    assert!(p.blocks * p.splits <= H200.multiprocessors && p.rows <= TILE_ROWS, "{p:?}");
                    assert!(output != Output::F32 || p.rows.is_multiple_of(8), "{p:?}");
                    assert!(p.blocks * p.passes * p.warpgroups * each * p.rows >= rows, "{p:?}");
                    assert!(p.slots >= 2 * p.warpgroups && p.slots.is_multiple_of(p.warpgroups), "{p:?}");
                    // One block per multiprocessor, as in csrc/gemm/gemv_splitk.cu.
                    assert!(p.shared <= H200.shared_memory && p.shared > H200.shared_memory / 2, "{p:?}");
                    // The tensor cores read whole tiles, also of the last slot.
                    assert!(p.input_slots * 32 * (width(m) + 1) >= TILE_ROWS, "{p:?}");
                }
            }
        }
    }
}
