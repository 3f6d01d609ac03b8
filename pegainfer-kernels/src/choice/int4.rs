//! Weights of four bits in groups of 128 columns on Hopper: the grids of csrc/gemm/skinny_int4_mma.cu and skinny_int4.cu,
//! GEMMs of few rows of x that read each code once.

use super::gemm_shape::{GemmShape, Output, WeightFormat};
use super::gpu::Gpu;
use super::groups::{split, width};
use super::packed::{Packed, Packing};
use super::skinny_wgmma::SkinnyPlan;
use crate::limits::{skinny_int4, skinny_wgmma};

/// Bytes of shared memory that barriers and alignment may take.
const RESERVED: usize = 2048;
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

/// Kernel of a skinny GEMM with packed weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Int4Gemm {
    /// csrc/gemm/skinny_int4_mma.cu: for up to 32 rows on Hopper.
    Mma(Int4MmaPlan),
    /// csrc/gemm/skinny_int4.cu: wgmma, for up to 64 rows, without gating 128, on Hopper.
    Wgmma(SkinnyPlan),
}

impl Int4Gemm {
    /// Maximum number of rows of x of each kernel.
    const MMA_ROWS: usize = 32;
    const GATED_ROWS: usize = 64;
    const WGMMA_ROWS: usize = 128;

    /// The kernel, if the weight is packed and x has few rows.
    pub fn choose(gpu: &Gpu, shape: GemmShape) -> Option<Self> {
        let GemmShape { m, n, k, output, format: WeightFormat::Grouped(format) } = shape else { return None };
        let packed = Packed::of(format, n, k).filter(|packed| packed.packing == Packing::Int4Wide)?;
        let most = if output == Output::Gated { Self::GATED_ROWS } else { Self::WGMMA_ROWS };
        match m {
            _ if !gpu.is_hopper() || m > most => None,
            ..=Self::MMA_ROWS => Some(Self::Mma(mma_plan(gpu, shape, packed))),
            _ => Some(Self::Wgmma(wgmma_plan(gpu, shape))),
        }
    }

    /// Name in records.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Mma(_) => "skinny_int4_mma",
            Self::Wgmma(_) => "skinny_int4",
        }
    }

    /// Number of splits of the columns, each of which leaves sums.
    pub fn splits(&self) -> usize {
        match self {
            Self::Mma(plan) => plan.splits,
            Self::Wgmma(plan) => plan.splits,
        }
    }
}

/// Deals the rows of w to blocks in even shares. A block has as many warps as it can: they hide each other's waits.
fn mma_plan(gpu: &Gpu, GemmShape { m, n, k, output, .. }: GemmShape, packed: Packed) -> Int4MmaPlan {
    let (gated, tiles) = (output == Output::Gated, 1 << width(m));
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
    let vectors = (rows + 14) / 8 + if packed.extra > 0 { (rows + 30) / 16 } else { 0 };
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

#[cfg(test)]
mod tests;
