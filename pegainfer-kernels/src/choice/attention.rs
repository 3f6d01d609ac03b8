//! Attention over the paged KV cache: the kernels for rows of few queries, and their grids; those for rows of many are
//! in [`prefill`](super::prefill).

use super::Gpu;
use super::prefill::{DecodeOverlap, Prefill};
use crate::heads::{BLOCK_SIZE, HeadShape, KvDType};
use crate::limits::attention::{DECODE_WARPS, LARGE_HEAD};
use crate::limits::fp8::BLOCK;
use crate::load::{AttentionLoad, DECODE_QUERIES, DecodeLoad};
use pegainfer_core::cuda::{COUNTERS, WORKSPACE_BYTES};

/// Maximum of queries times heads of a group in decode attention: columns of two tiles.
const DECODE_COLUMNS: usize = DECODE_QUERIES;
/// Columns of a tile of the decode kernels of csrc/attention/decode_bulk.cu.
const COLUMNS: usize = 8;

/// The kernel for rows of few queries: FlashDecoding, the KV of a row split over blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decode {
    /// csrc/attention/decode_bulk.cu: bulk copies fetch KV into a ring per warp; the last block of a row adds the
    /// partial results. See [`DecodeGrid`].
    Bulk(DecodeGrid),
    /// csrc/attention/decode_async.cu: cp.async fetches KV; with several splits, a second kernel adds their partial
    /// results.
    Async {
        /// Splits of each row and KV head.
        splits: usize,
    },
}

/// The grid of csrc/attention/decode_bulk.cu and csrc/attention/decode_gated.cu.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeGrid {
    /// Tiles of [`COLUMNS`] queries times heads of a group: 1 or 2.
    pub column_tiles: usize,
    /// Stages of a warp's ring.
    pub stages: usize,
    /// Blocks of a KV head: one for each row, and more that go to long rows.
    pub blocks: usize,
}

/// Kernels of `ops::attention`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attention {
    /// Kernel for rows of many queries, if there are any.
    pub prefill: Option<Prefill>,
    /// Kernel for rows of few queries, if there are any.
    pub decode: Option<Decode>,
}

/// Kernels of `ops::decode_attention` and `ops::gated_decode_attention`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecodeStep {
    /// Norms, rotation, write to the cache and attention in one kernel.
    Fused(DecodeGrid),
    /// Each in a kernel.
    Separate(Attention),
}

impl Attention {
    /// Chooses for `rows` rows, `tokens` queries in all, over a cache of this format.
    pub fn choose(
        gpu: &Gpu,
        shape: HeadShape,
        format: KvDType,
        load: &AttentionLoad,
        (rows, tokens): (usize, usize),
    ) -> Self {
        let (few, most) = (load.min_queries * shape.group(), load.max_queries * shape.group());
        let decodes = few <= DECODE_COLUMNS;
        let decode = decodes.then(|| Decode::choose(gpu, shape, load.decode(), rows));
        let overlap = match &decode {
            None => DecodeOverlap::Nothing,
            Some(Decode::Bulk(grid)) => DecodeOverlap::Bulk(grid.partial_bytes(shape)),
            Some(Decode::Async { .. }) => DecodeOverlap::Async,
        };
        let prefill =
            (most > DECODE_COLUMNS).then(|| Prefill::choose(gpu, (shape, format), load, (rows, tokens), overlap));
        Self { prefill, decode }
    }

    /// True if its kernels can round the output to FP8, that is, if no block of columns spans several heads.
    pub fn rounds(&self, shape: HeadShape) -> bool {
        let prefill = !matches!(self.prefill, Some(Prefill::Mma { .. }));
        shape.head_dim.is_multiple_of(BLOCK) && prefill && !matches!(self.decode, Some(Decode::Async { .. }))
    }

    /// Name in records.
    pub fn name(&self) -> &'static str {
        match (self.prefill, self.decode) {
            (Some(Prefill::Wgmma { .. }), None) => "flash_wgmma",
            (Some(Prefill::Wgmma { .. }), Some(_)) => "flash_wgmma+split_kv_bulk",
            (Some(Prefill::Mma { .. }), None) => "flash_mma",
            (Some(Prefill::Mma { .. }), Some(Decode::Bulk(_))) => "flash_mma+split_kv_bulk",
            (Some(Prefill::Mma { .. }), Some(Decode::Async { .. })) => "flash_mma+split_kv_async",
            (None, Some(Decode::Bulk(_))) => "split_kv_bulk",
            (None, Some(Decode::Async { .. })) => "split_kv_async",
            (None, None) => "none",
        }
    }
}

/// True if csrc/attention/decode_bulk.cu and csrc/attention/decode_gated.cu can run. They were written for 228 KB of
/// shared memory per multiprocessor, which consumer GPUs lack.
fn supports_bulk(gpu: &Gpu, shape: HeadShape) -> bool {
    gpu.is_data_centre() && matches!(shape.head_dim, 64 | 128 | 256)
}

impl Decode {
    fn choose(gpu: &Gpu, shape: HeadShape, load: DecodeLoad, rows: usize) -> Self {
        if supports_bulk(gpu, shape) {
            // Rows of prefill do not count: twice the columns cost 3 us of 65 us per layer.
            let column_tiles = if load.max_decode_queries * shape.group() <= COLUMNS { 1 } else { 2 };
            let stages = if shape.head_dim > LARGE_HEAD { 3 } else { 2 };
            return Self::Bulk(DecodeGrid::new(gpu, shape, rows, column_tiles, stages));
        }
        let most = (load.max_queries * shape.group()).min(DECODE_COLUMNS);
        let kv_blocks = load.longest.div_ceil(BLOCK_SIZE);
        let partial = async_partial_bytes(most, shape.head_dim);
        Self::Async { splits: async_splits(gpu.multiprocessors, rows * shape.kv_heads, kv_blocks, partial) }
    }
}

impl DecodeStep {
    /// Chooses `ops::decode_attention` for `rows` rows of one query.
    pub fn choose(gpu: &Gpu, shape: HeadShape, format: KvDType, load: &AttentionLoad, rows: usize) -> Self {
        Self::fused(gpu, (shape, format), load, rows, shape.head_dim <= LARGE_HEAD)
    }

    /// Chooses `ops::gated_decode_attention` for tokens with this many positions.
    pub fn choose_gated(
        gpu: &Gpu,
        (shape, positions): (HeadShape, usize),
        format: KvDType,
        load: &AttentionLoad,
        rows: usize,
    ) -> Self {
        Self::fused(gpu, (shape, format), load, rows, shape.head_dim == 256 && positions == 1)
    }

    /// True if its kernels can round the output to FP8.
    pub fn rounds(&self, shape: HeadShape) -> bool {
        match self {
            Self::Fused(_) => shape.head_dim.is_multiple_of(BLOCK),
            Self::Separate(attention) => attention.rounds(shape),
        }
    }

    fn fused(gpu: &Gpu, (shape, format): (HeadShape, KvDType), load: &AttentionLoad, rows: usize, built: bool) -> Self {
        if built && supports_bulk(gpu, shape) && shape.group() <= COLUMNS {
            // With FP8, four blocks per multiprocessor hide more latency than deep rings: 3.94 ms instead of 4.27 ms
            // for a step of 64 rows (Qwen3-4B, H200).
            let stages = match format {
                KvDType::Fp8 if shape.head_dim == 128 => 1,
                _ => fused_stages(gpu.multiprocessors, rows * shape.kv_heads, shape.head_dim),
            };
            return Self::Fused(DecodeGrid::new(gpu, shape, rows, 1, stages));
        }
        Self::Separate(Attention::choose(gpu, shape, format, load, (rows, rows)))
    }

    /// Name in records.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Fused(_) => "split_kv_bulk_fused",
            Self::Separate(attention) => attention.name(),
        }
    }
}

impl DecodeGrid {
    fn new(gpu: &Gpu, shape: HeadShape, rows: usize, column_tiles: usize, stages: usize) -> Self {
        let partial = Self::partial(shape, column_tiles);
        let slots = occupancy(stages) * gpu.multiprocessors;
        Self { column_tiles, stages, blocks: decode_blocks(slots, rows, shape.kv_heads, partial) }
    }

    /// Bytes of a partial result.
    fn partial(shape: HeadShape, column_tiles: usize) -> usize {
        COLUMNS * column_tiles * (shape.head_dim + 4) * size_of::<f32>()
    }

    /// Bytes of the workspace that partial results may take.
    fn partial_bytes(&self, shape: HeadShape) -> usize {
        self.blocks * shape.kv_heads * Self::partial(shape, self.column_tiles)
    }
}

/// Blocks per multiprocessor, by shared memory and registers, with `stages` stages in each warp's ring.
pub(crate) fn occupancy(stages: usize) -> usize {
    5usize.saturating_sub(stages).max(1)
}

/// Stages of a warp's ring for `pairs` pairs of row and KV head. With three stages a multiprocessor holds two blocks,
/// with two stages three. Deep rings keep the memory busy if the pairs nearly fill one or two rounds of two blocks and
/// would leave more of three idle: on an H200 35 us instead of 44 us for 32 rows of 1,100 tokens, 60 us instead of 65
/// us for 52 rows. A stage of heads of 256 has keys or values, and three keep the memory busy. A single row gives each
/// block a whole multiprocessor; it then has fewer splits, which take less time to add (23.6 us instead of 25.8 us for
/// 16k tokens).
fn fused_stages(multiprocessors: usize, pairs: usize, head_dim: usize) -> usize {
    if head_dim > LARGE_HEAD {
        return if 32 * pairs <= multiprocessors { 4 } else { 3 };
    }
    let nearly_fill = |blocks: usize| 3 * blocks < 4 * pairs && pairs <= blocks;
    let deep = nearly_fill(2 * multiprocessors) || nearly_fill(4 * multiprocessors);
    if deep && head_dim == 128 { 3 } else { 2 }
}

/// Number of blocks along x: one per row, and spare ones that go to long rows. It depends only on the number of rows,
/// so that a graph fits every context. All blocks are resident at once, in `slots`, if the rows leave any; some are
/// always spare, because rows differ in length.
fn decode_blocks(slots: usize, rows: usize, kv_heads: usize, partial_bytes: usize) -> usize {
    let resident = slots / kv_heads;
    let blocks = rows + resident.saturating_sub(rows).max(resident / 2);
    let fits = blocks * kv_heads <= COUNTERS && blocks * kv_heads * partial_bytes <= WORKSPACE_BYTES;
    if fits { blocks } else { rows }
}

/// Bytes of a partial result of csrc/attention/decode_async.cu, of a warp or a split: numerators, maximum and sum of
/// `rows` matrix rows.
pub(crate) fn async_partial_bytes(rows: usize, head_dim: usize) -> usize {
    rows * (head_dim + 2) * size_of::<f32>()
}

/// Blocks of csrc/attention/decode_async.cu that a multiprocessor should have: two fit, by registers.
const ASYNC_OCCUPANCY: usize = 2;
/// KV blocks that make a split worth its part of the sum: one for each warp.
const MIN_SPLIT: usize = DECODE_WARPS;

/// Splits of each (row, KV head), chosen by how many blocks of threads fill the GPU, never by the context alone.
fn async_splits(multiprocessors: usize, pairs: usize, kv_blocks: usize, partial_bytes: usize) -> usize {
    let wanted = (ASYNC_OCCUPANCY * multiprocessors).div_ceil(pairs).min(kv_blocks.div_ceil(MIN_SPLIT));
    let fits = WORKSPACE_BYTES / (pairs * partial_bytes);
    wanted.min(fits).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_that_a_graph_keeps_suit_long_contexts_whatever_they_were_captured_with() {
        let shape = HeadShape { heads: 32, kv_heads: 8, head_dim: 128 };
        for card in ["A100", "L4", "RTX 4090", "RTX 5090", "H100", "B200"] {
            let gpu = Gpu::named(card).unwrap();
            let splits = |context: usize, longest: usize| {
                let load = AttentionLoad { longest, ..AttentionLoad::of([(1, context)]) };
                DecodeStep::choose(&gpu, shape, KvDType::Bf16, &load, 1)
            };
            assert_eq!(splits(1, 16_384), splits(16_384, 16_384), "{card}");
            let async_kernel = matches!(splits(1, 1), DecodeStep::Separate(_));
            assert_eq!(splits(1, 1) != splits(1, 16_384), async_kernel, "{card}: without a graph the context counts");
        }
    }

    #[test]
    fn the_decode_grid_fills_the_gpu_and_fits_the_workspace() {
        let partial = COLUMNS * 132 * 4;
        let slots = occupancy(2) * 132;
        assert_eq!(decode_blocks(slots, 1, 8, partial), 49, "one row may have the whole GPU");
        assert_eq!(decode_blocks(slots, 8, 8, partial), 49);
        assert_eq!(decode_blocks(slots, 128, 8, partial), 152, "some are spare for long rows");
        assert_eq!(
            decode_blocks(slots, 100_000, 8, partial),
            100_000,
            "partial results would not fit: every row has one block"
        );
    }

    #[test]
    fn the_ring_is_deep_where_two_blocks_are_enough() {
        assert_eq!([1, 24, 28, 33, 34, 128].map(|rows| fused_stages(132, 8 * rows, 128)), [2, 2, 3, 3, 2, 2]);
        assert_eq!([48, 52, 64, 80].map(|rows| fused_stages(132, 8 * rows, 128)), [2, 3, 3, 2]);
        assert_eq!([1, 2, 128].map(|rows| fused_stages(132, 4 * rows, 256)), [4, 3, 3]);
    }

    #[test]
    fn splits_fill_the_gpu_and_fit_the_workspace() {
        let partial = 4 * 130 * 4;
        assert_eq!(async_splits(132, 8, 64, partial), 16, "one stream at 1k: one KV block a warp");
        assert_eq!(async_splits(132, 8, 4096, partial), 33, "one stream at 64k: as many as fill the GPU");
        assert_eq!(async_splits(132, 64 * 8, 4096, partial), 1, "many streams fill it without splits");
        assert_eq!(async_splits(132, 8, 1, partial), 1);
        assert!(async_splits(100_000, 100, 100_000, 16 * partial) * 100 * 16 * partial <= WORKSPACE_BYTES);
    }

    #[test]
    fn the_partial_results_of_large_heads_fit_every_gpu() {
        let small = Gpu::named("L4").unwrap().shared_memory;
        assert!(DECODE_WARPS * async_partial_bytes(DECODE_COLUMNS, 256) <= small);
    }
}
