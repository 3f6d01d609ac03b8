//! Kernels of the experts of a mixture, by rows of an expert.

use super::gpu::Gpu;
use crate::limits::moe_gemv;

/// Most rows of an expert, on average over all, for which it is a GEMV.
const GEMV_ROWS: usize = 4;
/// Pairs of a tile of the GEMM by mma.sync.
const TILES: [usize; 3] = [16, 32, 64];
/// Rows of an expert, on average, from which Hopper takes wgmma, and most rows for tiles of 64 pairs.
const WGMMA_ROWS: usize = 17;
const SMALL_WGMMA_ROWS: usize = 48;

/// Kernel of the grouped GEMMs of a mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupedGemm {
    /// csrc/moe/gemv.cu: few rows of each expert.
    Gemv,
    /// csrc/moe/mma.cu: many rows, in tiles of at most this many.
    Mma(usize),
    /// csrc/moe/wgmma.cu: many rows in bf16 on Hopper, in tiles of 64 or 128.
    Wgmma(usize),
}

impl GroupedGemm {
    /// The kernel for this number of pairs of a token and one of `count` experts.
    pub fn choose(gpu: &Gpu, pairs: usize, count: usize, is_bf16: bool) -> Self {
        let rows = pairs.div_ceil(count.max(1));
        if rows <= GEMV_ROWS {
            return Self::Gemv;
        }
        if gpu.is_hopper() && is_bf16 && rows >= WGMMA_ROWS {
            return Self::Wgmma(if rows <= SMALL_WGMMA_ROWS { 64 } else { 128 });
        }
        Self::Mma(TILES.into_iter().find(|tile| rows <= *tile).unwrap_or(TILES[TILES.len() - 1]))
    }

    /// Name in records.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Gemv => "experts_gemv",
            Self::Mma(_) => "experts_mma",
            Self::Wgmma(_) => "experts_wgmma",
        }
    }

    /// Most pairs of a tile.
    pub fn tile(&self) -> usize {
        match self {
            Self::Gemv => moe_gemv::TOKENS,
            Self::Mma(tile) | Self::Wgmma(tile) => *tile,
        }
    }

    /// Most tiles of so many pairs with `count` experts, however they are routed: an expert with n pairs has at most
    /// `1 + n / tile`.
    pub fn most_tiles(&self, pairs: usize, count: usize) -> usize {
        count.min(pairs) + pairs / self.tile()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_grow_with_the_rows_of_an_expert() {
        // Qwen3-30B-A3B.
        let of = |is_bf16: bool| {
            [0, 1, 64, 65, 256, 512, 1024, 4096].map(|t| GroupedGemm::choose(&Gpu::PLANNED, 8 * t, 128, is_bf16))
        };
        let (gemv, mma, wgmma) = (GroupedGemm::Gemv, GroupedGemm::Mma, GroupedGemm::Wgmma);
        assert_eq!(of(true), [gemv, gemv, gemv, mma(16), mma(16), wgmma(64), wgmma(128), wgmma(128)]);
        assert_eq!(of(false), [gemv, gemv, gemv, mma(16), mma(16), mma(32), mma(64), mma(64)]);
    }

    /// The tiles of an expert with `own` pairs, as csrc/moe/pairs.cuh cuts them.
    fn cut(own: usize, tile: usize) -> Vec<usize> {
        let unit = tile.min(16);
        let parts = own.div_ceil(tile).max(1);
        let size = own.div_ceil(parts).next_multiple_of(unit).max(unit);
        (0..own).step_by(size).map(|first| size.min(own - first)).collect()
    }

    #[test]
    fn the_grid_has_a_block_for_every_tile() {
        let tiles = [16, 32, 64].map(GroupedGemm::Mma).into_iter().chain([64, 128].map(GroupedGemm::Wgmma));
        for kernel in tiles.chain([GroupedGemm::Gemv]) {
            for own in 1..1000 {
                let tiles = cut(own, kernel.tile());
                assert!(tiles.iter().all(|tile| *tile <= kernel.tile()), "{own} pairs: {tiles:?}");
                assert_eq!(tiles.iter().sum::<usize>(), own);
                assert!(tiles.len() <= 1 + own / kernel.tile());
                // Two experts with `own` pairs each, and one without pairs.
                assert!(2 * tiles.len() <= kernel.most_tiles(2 * own, 3), "{own} pairs of {kernel:?}");
            }
        }
    }
}
