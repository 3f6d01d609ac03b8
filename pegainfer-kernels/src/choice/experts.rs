//! Kernels of the experts of a mixture, by rows of an expert.

use super::gpu::Gpu;
use crate::limits::moe_wgmma;

/// Most pairs that are GEMVs: hardly two have the same expert.
const GEMV_PAIRS: usize = 31;
/// Pairs of a tile of the GEMM by mma.sync.
const TILES: [usize; 3] = [16, 32, 64];
/// Most tokens whose experts the router's GEMM chooses itself: more fill the GPU with two launches.
const ROUTER_TOKENS: usize = 32;

/// True if one kernel computes the router's logits of so many tokens and chooses their experts.
pub fn fuses_router(tokens: usize, hidden: usize) -> bool {
    (1..=ROUTER_TOKENS).contains(&tokens) && hidden.is_multiple_of(8)
}

/// The experts of a layer, as the choice sees them.
#[derive(Debug, Clone, Copy)]
pub struct ExpertShape {
    /// Number of experts.
    pub count: usize,
    /// All in bf16; otherwise FP8 or, on CPUs alone, others.
    pub is_bf16: bool,
    /// Columns of `gate_up` and of `down`.
    pub columns: [usize; 2],
    /// True if the matrices are in several parts.
    pub in_parts: bool,
}

impl ExpertShape {
    /// True if wgmma takes whole steps of the columns.
    fn has_whole_steps(&self) -> bool {
        let step = if self.is_bf16 { 64 } else { 128 };
        self.columns.iter().all(|k| k.is_multiple_of(step))
    }
}

/// Kernel of the grouped GEMMs of a mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupedGemm {
    /// csrc/moe/gemv.cu: few pairs.
    Gemv,
    /// csrc/moe/mma.cu: many rows, in tiles of at most this many.
    Mma(usize),
    /// csrc/moe/wgmma.cu: many rows on Hopper, FP8 by FP8.
    Wgmma,
}

impl GroupedGemm {
    /// The kernel for this number of pairs of a token and an expert.
    pub fn choose(gpu: &Gpu, pairs: usize, experts: ExpertShape) -> Self {
        let rows = pairs.div_ceil(experts.count.max(1));
        if pairs <= GEMV_PAIRS && !experts.in_parts {
            return Self::Gemv;
        }
        if gpu.is_hopper() && experts.has_whole_steps() {
            return Self::Wgmma;
        }
        Self::Mma(TILES.into_iter().find(|tile| rows <= *tile).unwrap_or(TILES[TILES.len() - 1]))
    }

    /// Name in records.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Gemv => "experts_gemv",
            Self::Mma(_) => "experts_mma",
            Self::Wgmma => "experts_wgmma",
        }
    }

    /// True if the kernel rounds activations of FP8 weights to FP8.
    pub fn rounds(&self, is_bf16: bool) -> bool {
        matches!(self, Self::Wgmma) && !is_bf16
    }

    /// Most pairs of a tile.
    pub fn tile(&self) -> usize {
        match self {
            Self::Gemv => 1,
            Self::Mma(tile) => *tile,
            Self::Wgmma => moe_wgmma::TOKENS,
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
    use crate::choice::Architecture;

    #[test]
    fn few_pairs_are_gemvs_and_tiles_grow_with_the_rows_of_an_expert() {
        // Qwen3-30B-A3B.
        let of = |gpu: &Gpu, columns, in_parts| {
            let experts = ExpertShape { count: 128, is_bf16: true, columns, in_parts };
            [0, 1, 3, 4, 512, 1024].map(|tokens| GroupedGemm::choose(gpu, 8 * tokens, experts))
        };
        let (gemv, mma, wgmma) = (GroupedGemm::Gemv, GroupedGemm::Mma, GroupedGemm::Wgmma);
        let ampere = Gpu { architecture: Architecture::Ampere, ..Gpu::PLANNED };
        assert_eq!(of(&Gpu::PLANNED, [2048, 768], false), [gemv, gemv, gemv, wgmma, wgmma, wgmma]);
        assert_eq!(of(&ampere, [2048, 768], false), [gemv, gemv, gemv, mma(16), mma(32), mma(64)]);
        assert_eq!(of(&Gpu::PLANNED, [2048, 760], false), of(&ampere, [2048, 768], false));
        assert_eq!(of(&Gpu::PLANNED, [2048, 768], true), [wgmma; 6]);
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
        let tiles = [16, 32, 64].map(GroupedGemm::Mma).into_iter();
        for kernel in tiles.chain([GroupedGemm::Wgmma]) {
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
