//! Weights of four bits on a GPU: which of them are packed in the order of the kernels, and the grids of
//! csrc/gemm/skinny_int4_mma.cu, skinny_int4.cu and gemv_int4.cu, GEMMs of few rows of x that read each code once.

use super::gemm_shape::{GemmShape, Output, WeightFormat};
use super::gpu::Gpu;
use super::skinny_wgmma::SkinnyPlan;
use crate::limits::{gemv_int4, skinny_int4, skinny_wgmma};
use pegainfer_core::weights::grouped::format::{GroupFormat, GroupScales, Offset, ScaleDType, Values};

/// Columns of a block of packed codes, which share a scale.
const BLOCK: usize = 128;
/// Rows of packed scales are a multiple of this: vectors of zero points.
const ROW_UNIT: usize = 16;
/// Bytes of shared memory that barriers and alignment may take.
const RESERVED: usize = 2048;
/// Columns below which a split is not worth adding its sums.
const MIN_SPLIT: usize = 1024;
const MAX_SPLITS: usize = 8;

/// The layout of packed weights `[n, k]`; see csrc/common/int4.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packed {
    /// A group has `2^group_shift` blocks of 128 columns.
    pub group_shift: usize,
    /// Groups of a row.
    pub groups: usize,
    /// Scales are f16, not bf16.
    pub f16: bool,
    /// Groups have zero points.
    pub zeros: bool,
}

impl Packed {
    /// The layout if a GPU packs weights `[n, k]` of this format: integers of four bits with a group of 128 columns times
    /// a power of two, or of a whole row.
    pub fn of(format: GroupFormat, n: usize, k: usize) -> Option<Self> {
        let GroupScales::Plain { group, dtype, offset } = format.scales else { return None };
        let blocks = group / BLOCK;
        let whole = group == k;
        let fits = group.is_multiple_of(BLOCK) && (whole || blocks.is_power_of_two());
        let layout = format.values == Values::Int { bits: 4 } && dtype != ScaleDType::F32 && offset != Offset::Min;
        let sizes = n.is_multiple_of(ROW_UNIT) && k.is_multiple_of(BLOCK) && group > 0;
        (layout && fits && sizes).then(|| Self {
            group_shift: if whole { usize::BITS as usize / 2 - 1 } else { blocks.ilog2() as usize },
            groups: k / group,
            f16: dtype == ScaleDType::F16,
            zeros: offset == Offset::Zero,
        })
    }

    /// Byte of the scales of `n` rows where zero points begin; 0 without.
    pub fn zeros_at(self, n: usize) -> u64 {
        if self.zeros { (self.groups * n * 2) as u64 } else { 0 }
    }
}

/// Distribution of csrc/gemm/skinny_int4_mma.cu over the GPU, as parameters of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Int4MmaPlan {
    /// Splits of the columns.
    pub splits: usize,
    /// Columns of a split.
    pub split_columns: usize,
    /// Blocks of a split.
    pub blocks: usize,
    /// Rows of w of a tile, if gated of the gate.
    pub rows: usize,
    /// Tiles of a block.
    pub passes: usize,
    /// Warps with the rows of a tile.
    pub strips: usize,
    /// Sets of such warps, which take turns.
    pub parts: usize,
    /// Slots of 256 columns in shared memory.
    pub slots: usize,
    /// Bytes of shared memory.
    pub shared: usize,
}

/// Distribution of csrc/gemm/gemv_int4.cu over the GPU, as parameters of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemvInt4Plan {
    /// Splits of the columns.
    pub splits: usize,
    /// Columns of a split.
    pub split_columns: usize,
    /// Blocks of a split.
    pub blocks: usize,
    /// Warps of a block.
    pub warps: usize,
    /// Warps that share a tile of rows.
    pub parts: usize,
    /// Chunks of x in shared memory.
    pub slots: usize,
    /// Bytes of shared memory.
    pub shared: usize,
}

/// Kernel of a skinny GEMM with packed weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Int4Gemm {
    /// csrc/gemm/skinny_int4_mma.cu: for up to 32 rows on Hopper.
    Mma(Int4MmaPlan),
    /// csrc/gemm/skinny_int4.cu: wgmma, for up to 64 rows, without gating 128, on Hopper.
    Wgmma(SkinnyPlan),
    /// csrc/gemm/gemv_int4.cu: for up to 16 rows on other GPUs.
    Gemv(GemvInt4Plan),
}

impl Int4Gemm {
    /// Maximum number of rows of x of each kernel.
    const MMA_ROWS: usize = 32;
    const GATED_ROWS: usize = 64;
    const WGMMA_ROWS: usize = 128;
    const GEMV_ROWS: usize = 16;

    /// The kernel, if the weight is packed and x has few rows.
    pub fn choose(gpu: &Gpu, shape: GemmShape) -> Option<Self> {
        let GemmShape { m, n, k, output, format: WeightFormat::Grouped(format) } = shape else { return None };
        let packed = Packed::of(format, n, k)?;
        let most = if output == Output::Gated { Self::GATED_ROWS } else { Self::WGMMA_ROWS };
        match gpu.is_hopper() {
            true if m <= Self::MMA_ROWS => Some(Self::Mma(mma_plan(gpu, shape, packed))),
            true if m <= most => Some(Self::Wgmma(wgmma_plan(gpu, shape))),
            false if m <= Self::GEMV_ROWS => Some(Self::Gemv(gemv_plan(gpu, shape))),
            _ => None,
        }
    }

    /// Name in records.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Mma(_) => "skinny_int4_mma",
            Self::Wgmma(_) => "skinny_int4",
            Self::Gemv(_) => "gemv_int4",
        }
    }

    /// Number of splits of the columns, each of which leaves sums.
    pub fn splits(&self) -> usize {
        match self {
            Self::Mma(plan) => plan.splits,
            Self::Wgmma(plan) => plan.splits,
            Self::Gemv(plan) => plan.splits,
        }
    }
}

/// Index of the kernel for `m` rows of x in a list of those for 8, 16 and 32.
pub(crate) fn mma_width(m: usize) -> usize {
    m.div_ceil(8).next_power_of_two().ilog2() as usize
}

/// Splits of `k` columns so that each has about `rows` rows of w per block, and their columns.
fn split(gpu: &Gpu, (n, k): (usize, usize), output: Output, rows: usize, step: usize) -> (usize, usize) {
    let splits = match output {
        Output::SplitK => (gpu.multiprocessors * rows / n).min(k / MIN_SPLIT).clamp(1, MAX_SPLITS),
        _ => 1,
    };
    let columns = k.div_ceil(step).div_ceil(splits) * step;
    (k.div_ceil(columns), columns)
}

/// Deals the rows of w to blocks in even shares. A block has as many warps as it can: they hide each other's waits.
fn mma_plan(gpu: &Gpu, GemmShape { m, n, k, output, .. }: GemmShape, packed: Packed) -> Int4MmaPlan {
    let (gated, tiles) = (output == Output::Gated, 1 << mma_width(m));
    let (all, strip, boxes) = if gated { (n / 2, 8, 2) } else { (n, 16, 1) };
    // With more rows of x a slot is larger, so that fewer rows of w fill the ring.
    let (split_rows, most_strips) = if m <= 16 { (128, skinny_int4::MMA_WARPS) } else { (80, 6) };
    let (splits, split_columns) = split(gpu, (n, k), output, split_rows, skinny_int4::COLUMNS);
    let blocks = (gpu.multiprocessors / splits).clamp(1, all.div_ceil(8));
    let share = all.div_ceil(blocks);
    let passes = share.div_ceil(strip * most_strips);
    let rows = share.div_ceil(passes);
    let strips = rows.div_ceil(strip);
    let steps = split_columns / skinny_int4::COLUMNS;
    let vectors = (rows + 14) / 8 + if packed.zeros { (rows + 30) / 16 } else { 0 };
    let slot = boxes * (rows.next_multiple_of(8) * 128 + 2 * vectors * 16) + 4 * 8 * tiles * 128 + 16;
    let sums = |parts: usize| if parts > 1 { strips * parts * 32 * 4 * tiles * size_of::<f32>() } else { 0 };
    let slots = |parts: usize| gpu.shared_memory.saturating_sub(RESERVED + sums(parts)) / slot;
    let fits = |parts: &usize| slots(*parts) >= 2 * parts;
    let most = (skinny_int4::MMA_WARPS / strips).min(steps).max(1);
    let parts = (1..=most).rev().find(fits).unwrap_or(1);
    let slots = slots(parts).clamp(2, 32);
    // More than half, so that a multiprocessor holds one block.
    let shared = (slots * slot + sums(parts)).max(gpu.shared_memory / 2 + 1024);
    Int4MmaPlan { splits, split_columns, blocks, rows, passes, strips, parts, slots, shared }
}

/// Variant of the plan of csrc/gemm/skinny_wgmma.cu with slots of 256 columns and one warpgroup where two do not have the
/// registers.
fn wgmma_plan(gpu: &Gpu, GemmShape { m, n, k, output, .. }: GemmShape) -> SkinnyPlan {
    let gated = output == Output::Gated;
    let (all, width) = (if gated { n / 2 } else { n }, if m <= 64 { 64 } else { 128 });
    let (splits, split_columns) = split(gpu, (n, k), output, 64, skinny_int4::COLUMNS);
    let blocks = (gpu.multiprocessors / splits).clamp(1, all.div_ceil(8));
    let (share, most) = (all.div_ceil(blocks), if width > 64 || gated { 1 } else { skinny_wgmma::MAX_WARPGROUPS });
    let wanted = share.div_ceil(64);
    let warpgroups = wanted.min(most);
    let passes = wanted.div_ceil(warpgroups);
    let rows = share.div_ceil(warpgroups * passes);
    let (slot, input_slot) = (rows.next_multiple_of(8) * 128 + 512 + 16, width * 512 + 16);
    let input_slots = if width > 64 { 2 } else { 3 };
    let free = gpu.shared_memory.saturating_sub(RESERVED + input_slots * input_slot).min(112 << 10);
    let slots = free / slot / warpgroups * warpgroups;
    let shared = (slots * slot + input_slots * input_slot).max(gpu.shared_memory / 2 + 1024);
    SkinnyPlan { splits, split_columns, blocks, warpgroups, passes, rows, slots, input_slots, shared }
}

/// Variant of the plan of csrc/gemm/gemv_splitk.cu in which several warps share a tile of rows.
fn gemv_plan(gpu: &Gpu, GemmShape { m, n, k, output, .. }: GemmShape) -> GemvInt4Plan {
    const SLOTS: usize = 3;
    let (gated, tiles) = (output == Output::Gated, if m <= 8 { 1 } else { 2 });
    let (all, tile) = if gated { (n / 2, 8) } else { (n, 16) };
    let (splits, split_columns) = split(gpu, (n, k), output, 72, gemv_int4::STEP);
    let blocks = (gpu.multiprocessors / splits).clamp(1, all.div_ceil(tile));
    let (each, steps) = (all.div_ceil(blocks), split_columns / gemv_int4::STEP);
    let bytes = |warps: usize, parts: usize| {
        let (ring, chunk) = (gemv_int4::RING * gemv_int4::STEP * 8, parts * gemv_int4::STEP * 16 * tiles);
        warps * (ring + 32 * 16 * tiles) + SLOTS * chunk
    };
    let most = if m <= 8 { gemv_int4::MAX_WARPS } else { 16 };
    let strips = |parts: usize| {
        let strips = most / parts;
        each.div_ceil(tile * each.div_ceil(tile * strips))
    };
    let fits = |parts: &usize| {
        let whole = *parts == 1 || strips(*parts) * tile >= each;
        whole && *parts <= steps && bytes(strips(*parts) * parts, *parts) <= gpu.shared_memory
    };
    let parts = [4, 2, 1].into_iter().find(fits).unwrap_or(1);
    let mut warps = strips(parts) * parts;
    while warps > parts && bytes(warps, parts) > gpu.shared_memory {
        warps -= parts;
    }
    let shared = bytes(warps, parts).max(gpu.shared_memory / 2 + 1024);
    GemvInt4Plan { splits, split_columns, blocks, warps, parts, slots: SLOTS, shared }
}

#[cfg(test)]
mod tests;
