//! Skinny GEMMs with packed weights of all formats: the grid of csrc/gemm/skinny_groups.cuh.

use super::gemm_shape::{GemmShape, Output, WeightFormat};
use super::gpu::Gpu;
use super::packed::Packed;
use crate::limits::skinny_groups::{WARPS_8, WARPS_16, WARPS_32};

/// Maximum number of rows of x.
const MAX_ROWS: usize = 32;
/// Rows of w of a tile.
const TILE: usize = 16;
/// Columns of a unit.
const UNIT: usize = 256;
/// Bytes of the sums of a warp for a tile and 8 rows of x.
const SUMS: usize = 32 * 16;
/// Rows of w that a multiprocessor should have.
const ROWS: usize = 128;
/// Columns below which a split is not worth adding its sums.
const MIN_SPLIT: usize = 1024;
const MAX_SPLITS: usize = 8;

/// Distribution over the GPU, as parameters of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupsPlan {
    /// Splits of the columns.
    pub splits: usize,
    /// Columns of a split.
    pub split_columns: usize,
    /// Blocks of a split.
    pub blocks: usize,
    /// Warps of a block.
    pub warps: usize,
    /// Columns of x in shared memory at a time.
    pub chunk: usize,
    /// Sums for each warp: tiles of which it may have a part.
    pub slots: usize,
    /// Bytes of shared memory.
    pub shared: usize,
}

impl GroupsPlan {
    /// The plan, if the weight is packed in whole units and x has few rows.
    ///
    /// Usually each multiprocessor has one block. The output matrix has so many rows that the sums of a block's tiles
    /// may not fit the shared memory; then there are several blocks for each multiprocessor, as few as fit.
    pub fn choose(gpu: &Gpu, shape: GemmShape) -> Option<Self> {
        let GemmShape { m, n, k, output, format: WeightFormat::Grouped(format) } = shape else { return None };
        let packed = Packed::of(format, n, k).filter(|_| (1..=MAX_ROWS).contains(&m) && k.is_multiple_of(UNIT))?;
        let (splits, split_columns) = split(gpu, (n, k), output, ROWS, UNIT);
        // Of a row of x: 16 bytes in all, and of a unit its columns and, for minima, eight sums.
        let unit = 2 * UNIT + if packed.has_minima() { 32 } else { 0 };
        let of = |blocks: usize| {
            let (tiles, warps) = (1 << width(m), [WARPS_8, WARPS_16, WARPS_32][width(m)]);
            let slots = (n / TILE).div_ceil(blocks).div_ceil(warps) + 1;
            let sums = warps * slots * tiles * SUMS;
            let fit = (gpu.shared_memory.checked_sub(sums)? / m).checked_sub(16)? / unit;
            let units = split_columns / UNIT;
            let chunk = units.div_ceil(units.div_ceil(Some(fit).filter(|fit| *fit > 0)?));
            let shared = sums + m * (16 + chunk * unit);
            Some(Self { splits, split_columns, blocks, warps, chunk: chunk * UNIT, slots, shared })
        };
        let most = n / TILE;
        let waves = (most * splits).div_ceil(gpu.multiprocessors);
        (1..=waves).find_map(|waves| of((gpu.multiprocessors * waves / splits).clamp(1, most)))
    }
}

/// Index of the kernel for `m` rows of x in a list of those for 8, 16 and 32.
pub(crate) fn width(m: usize) -> usize {
    m.div_ceil(8).next_power_of_two().ilog2() as usize
}

/// Splits of `k` columns so that each has about `rows` rows of w per block, and their columns, a multiple of `step`.
pub(super) fn split(gpu: &Gpu, (n, k): (usize, usize), output: Output, rows: usize, step: usize) -> (usize, usize) {
    let splits = match output {
        Output::SplitK => (gpu.multiprocessors * rows / n).min(k / MIN_SPLIT).clamp(1, MAX_SPLITS),
        _ => 1,
    };
    let columns = k.div_ceil(step).div_ceil(splits) * step;
    (k.div_ceil(columns), columns)
}

#[cfg(test)]
mod tests;
