//! Attention of rows of many queries: its kernel, and the division of the GPU between it and rows that decode.

use super::Gpu;
use super::widening::Widening;
use crate::heads::{HeadShape, KvDType};
use crate::limits::attention::DECODE_ROWS;
use crate::load::AttentionLoad;

/// The kernel for rows of many queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefill {
    /// csrc/attention/prefill_wgmma.cu: FlashAttention by wgmma. Decode attention may run concurrently, because
    /// this kernel releases its successor only after all kernels before it are complete; see csrc/attention/decode.cuh.
    Wgmma {
        /// Blocks, each of which takes tiles in turn.
        blocks: usize,
        /// Widening of an FP8 cache before it; `None` for a bf16 cache.
        widening: Option<Widening>,
    },
    /// csrc/attention/prefill_mma.cu: FlashAttention by mma.sync. It is complete before decode attention starts.
    Mma {
        /// Blocks: at least one for each tile of each KV head.
        blocks: usize,
    },
}

/// Attention of rows that decode in the same step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DecodeOverlap {
    /// No rows decode.
    Nothing,
    /// Runs concurrently with prefill attention, with this many bytes of partial results in the workspace.
    Bulk(usize),
    /// Runs after prefill attention and may use the whole workspace.
    Async,
}

impl Prefill {
    pub(super) fn choose(
        gpu: &Gpu,
        (shape, format): (HeadShape, KvDType),
        load: &AttentionLoad,
        (rows, tokens): (usize, usize),
        overlap: DecodeOverlap,
    ) -> Self {
        let mma = Self::Mma { blocks: mma_blocks(shape, load, (rows, tokens)) };
        if !gpu.is_hopper() {
            return mma;
        }
        let used = match overlap {
            DecodeOverlap::Nothing => Some(0),
            DecodeOverlap::Bulk(bytes) => Some(bytes),
            DecodeOverlap::Async => None,
        };
        let widening = match format {
            KvDType::Bf16 => None,
            KvDType::Fp8 => match used.and_then(|used| Widening::choose(shape, load, rows, used)) {
                None => return mma,
                widening => widening,
            },
        };
        let share = || PrefillShare::of(load, (rows, tokens), (shape, format)).blocks(gpu);
        Self::Wgmma { blocks: if overlap == DecodeOverlap::Nothing { gpu.multiprocessors } else { share() }, widening }
    }
}

/// Upper bound of the tiles of csrc/attention/prefill_mma.cu: each row of the batch may end within a tile.
fn mma_blocks(shape: HeadShape, load: &AttentionLoad, (rows, tokens): (usize, usize)) -> usize {
    let decode_rows = if shape.group() <= DECODE_ROWS { load.decode_rows } else { 0 };
    let matrix_rows = (tokens - decode_rows) * shape.group();
    shape.kv_heads * (matrix_rows.div_ceil(MMA_ROWS) + rows - decode_rows)
}

/// Queries times heads of a group that are a tile of csrc/attention/prefill_mma.cu.
const MMA_ROWS: usize = crate::limits::prefill_mma::ROWS;
/// Queries times heads of a group that are a tile of csrc/attention/prefill_wgmma.cu.
const PREFILL_ROWS: usize = crate::limits::prefill_wgmma::ROWS;
/// Share of the peak rate that csrc/attention/prefill_wgmma.cu reaches (500 TFLOP/s on an H200).
const PREFILL_EFFICIENCY: f64 = 0.505;
/// Share of the memory's rate that decode attention reaches (4.2 TB/s on an H200).
const DECODE_EFFICIENCY: f64 = 0.875;

/// Work of a mixed step's attention, for dividing the GPU between prefill and decode.
#[derive(Debug, Clone, Copy)]
struct PrefillShare {
    /// Tiles of prefill, taken for equal.
    tiles: usize,
    /// FLOPs of prefill.
    flops: u64,
    /// Bytes of the cache that decode attention reads.
    bytes: u64,
}

impl PrefillShare {
    fn of(load: &AttentionLoad, (rows, tokens): (usize, usize), (shape, format): (HeadShape, KvDType)) -> Self {
        let HeadShape { heads, kv_heads, head_dim } = shape;
        let prompts = (rows - load.decode_rows).max(1);
        // Each prompt ends within a tile.
        let row_tiles = ((tokens - load.decode_rows) * shape.group()).div_ceil(PREFILL_ROWS) + prompts - 1;
        Self {
            tiles: kv_heads * row_tiles.max(1),
            flops: 4 * load.attended.saturating_sub(load.decode_context) * (heads * head_dim) as u64,
            bytes: load.decode_context * shape.kv_bytes_per_token(format) as u64,
        }
    }

    /// Number of blocks of prefill: one per multiprocessor, unless decode attention runs concurrently. Prefill is bound
    /// by arithmetic, so its time depends on its share; decoding is bound by memory, which half of the multiprocessors
    /// keep busy. Among the shares in which all blocks have equally many tiles, picks the one that minimises the time
    /// of whichever ends last.
    fn blocks(self, gpu: &Gpu) -> usize {
        let multiprocessors = gpu.multiprocessors;
        if self.bytes == 0 {
            return multiprocessors;
        }
        let (flops, bandwidth) = (PREFILL_EFFICIENCY * gpu.flops, DECODE_EFFICIENCY * gpu.bandwidth);
        let tile = self.flops as f64 / self.tiles as f64 / flops * multiprocessors as f64;
        let end = |rounds: usize| {
            let prefill = rounds as f64 * tile;
            let left = 1.0 - self.tiles.div_ceil(rounds) as f64 / multiprocessors as f64;
            let read = prefill * (2.0 * left).min(1.0);
            prefill + (self.bytes as f64 / bandwidth - read).max(0.0)
        };
        let rounds = self.tiles.div_ceil(multiprocessors)..=self.tiles.div_ceil(multiprocessors / 2);
        let best = rounds.min_by(|&a, &b| end(a).total_cmp(&end(b)));
        best.map_or(multiprocessors, |rounds| self.tiles.div_ceil(rounds))
    }
}

#[cfg(test)]
mod tests {
    use super::super::attention::Attention;
    use super::*;
    use pegainfer_core::cuda::WORKSPACE_BYTES;

    #[test]
    fn as_many_heads_are_widened_as_the_workspace_takes() {
        let shape = HeadShape { heads: 32, kv_heads: 8, head_dim: 128 };
        let gpu = Gpu::PLANNED;
        let choose = |rows: &[(usize, usize)]| {
            let load = AttentionLoad::of(rows.iter().copied());
            let tokens = rows.iter().map(|(queries, _)| queries).sum();
            Attention::choose(&gpu, shape, KvDType::Fp8, &load, (rows.len(), tokens)).prefill
        };
        let heads = |rows: &[(usize, usize)]| match choose(rows) {
            Some(Prefill::Wgmma { widening: Some(widening), .. }) => {
                let bytes = widening.kv_heads * widening.kv_blocks * 2 * 16 * 128 * 2;
                assert!(
                    widening.first_byte + bytes <= WORKSPACE_BYTES && widening.first_byte % Widening::ALIGNMENT == 0
                );
                let contexts = rows.iter().filter(|(queries, _)| *queries > 4).map(|(_, context)| context.div_ceil(16));
                assert!(widening.kv_blocks >= contexts.sum());
                Some(widening.kv_heads)
            }
            _ => None,
        };
        assert_eq!(heads(&[(4096, 4096)]), Some(8));
        assert_eq!(heads(&[(4096, 16_384), (100, 7_001)]), Some(8));
        assert_eq!(heads(&[(4096, 40_960)]), Some(4));
        assert_eq!(heads(&[(4096, 131_072)]), Some(2));
        assert_eq!(heads(&[(4096, 262_144)]), Some(1));
        let mma = Some(Prefill::Mma { blocks: 8 * (4096 * 4 / MMA_ROWS + 1) });
        assert_eq!(choose(&[(4096, 524_288)]), mma, "no head fits");
        let mixed: Vec<_> = [(1, 3_000); 100].into_iter().chain([(400, 8_000), (3, 17)]).collect();
        assert_eq!(heads(&mixed), Some(8));
    }

    #[test]
    fn blocks_cover_the_tiles_of_all_prompts() {
        let lists: [&[(usize, usize)]; 4] =
            [&[(1, 9); 40], &[(1, 9), (33, 40), (33, 33)], &[(5, 5); 7], &[(1, 300), (4096, 9000), (17, 20)]];
        for (rows, group) in lists.iter().flat_map(|rows| [1, 4, 32].map(|group| (rows, group))) {
            let shape = HeadShape { heads: 2 * group, kv_heads: 2, head_dim: 128 };
            let load = AttentionLoad::of(rows.iter().copied());
            let matrix_rows = rows.iter().map(|(queries, _)| queries * group).filter(|rows| *rows > DECODE_ROWS);
            let tiles: usize = matrix_rows.map(|rows| 2 * rows.div_ceil(MMA_ROWS)).sum();
            let tokens = rows.iter().map(|(queries, _)| queries).sum();
            assert!(mma_blocks(shape, &load, (rows.len(), tokens)) >= tiles, "{rows:?} {group}");
        }
    }

    /// Number of blocks for Qwen3-4B on an H200, for decoding rows with the sum of their contexts, and prompts of these
    /// lengths, the first of them after `after` cached tokens.
    fn blocks((decode_rows, decode_context): (usize, u64), prompts: &[u64], after: u64) -> usize {
        let shape = HeadShape { heads: 32, kv_heads: 8, head_dim: 128 };
        let (rows, tokens) = (decode_rows + prompts.len(), prompts.iter().sum::<u64>() as usize);
        let attended = prompts[0] * after + prompts.iter().map(|n| n * (n + 1) / 2).sum::<u64>() + decode_context;
        let load = AttentionLoad { attended, decode_rows, decode_context, ..AttentionLoad::default() };
        PrefillShare::of(&load, (rows, tokens + decode_rows), (shape, KvDType::Bf16)).blocks(&Gpu::PLANNED)
    }

    #[test]
    fn prefill_leaves_multiprocessors_to_rows_that_decode() {
        let many = (40, 44_000);
        assert_eq!(blocks((0, 0), &[512], 0), 132, "nothing to leave them to");
        assert_eq!(blocks(many, &[472], 0), 60, "decoding takes longer: two tiles a block");
        assert_eq!(blocks(many, &[64], 448), 16, "no more than tiles");
        assert_eq!(blocks(many, &[1000, 1000], 0), 86, "both end together");
        assert_eq!(blocks((1, 1100), &[511], 0), 128, "decoding is nothing next to a second round");
        assert_eq!(blocks(many, &[472], 4096), 120, "nor is it much next to one of long tiles");
        assert!(blocks((100, 1_000_000), &[1, 2, 3], 0) <= 132);
    }
}
