//! Attention over the paged KV cache: the kernels for rows of few queries, and their grids; those for rows of many are
//! in [`prefill`](super::prefill).

use super::Gpu;
use super::prefill::Prefill;
use crate::heads::{HeadShape, KvDType};
use crate::limits::attention::LARGE_HEAD;
use crate::limits::fp8::BLOCK;
use crate::load::{AttentionLoad, DECODE_QUERIES};
use pegainfer_core::cuda::{COUNTERS, WORKSPACE_BYTES};

/// Maximum of queries times heads of a group in decode attention: columns of two tiles.
const DECODE_COLUMNS: usize = DECODE_QUERIES;
/// Columns of a tile of the decode kernels of csrc/attention/decode_bulk.cu.
const COLUMNS: usize = 8;

/// The grid of csrc/attention/decode_bulk.cu and csrc/attention/decode_gated.cu, FlashDecoding: copies fetch KV into a ring
/// per warp; the last block of a row adds the partial results.
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
    pub decode: Option<DecodeGrid>,
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
        let decode = decodes.then(|| DecodeGrid::choose(gpu, shape, load.max_decode_queries, rows));
        let decode_bytes = decode.map(|grid| grid.partial_bytes(shape));
        let prefill =
            (most > DECODE_COLUMNS).then(|| Prefill::choose(gpu, (shape, format), load, (rows, tokens), decode_bytes));
        Self { prefill, decode }
    }

    /// True if its kernels can round the output to FP8, that is, if no block of columns spans several heads.
    pub fn rounds(&self, shape: HeadShape) -> bool {
        let prefill = !matches!(self.prefill, Some(Prefill::Mma { .. }));
        shape.head_dim.is_multiple_of(BLOCK) && prefill
    }

    /// Name in records.
    pub fn name(&self) -> &'static str {
        match (self.prefill, self.decode) {
            (Some(Prefill::Wgmma { .. }), None) => "flash_wgmma",
            (Some(Prefill::Wgmma { .. }), Some(_)) => "flash_wgmma+split_kv_bulk",
            (Some(Prefill::Mma { .. }), None) => "flash_mma",
            (Some(Prefill::Mma { .. }), Some(_)) => "flash_mma+split_kv_bulk",
            (None, Some(_)) => "split_kv_bulk",
            (None, None) => "none",
        }
    }
}

impl DecodeStep {
    /// Chooses `ops::decode_attention` for `rows` rows of one query.
    pub fn choose(gpu: &Gpu, shape: HeadShape, format: KvDType, load: &AttentionLoad, rows: usize) -> Self {
        Self::fused(gpu, (shape, format), load, rows, shape.head_dim <= LARGE_HEAD)
    }

    /// Chooses `ops::gated_decode_attention`.
    pub fn choose_gated(gpu: &Gpu, shape: HeadShape, format: KvDType, load: &AttentionLoad, rows: usize) -> Self {
        Self::fused(gpu, (shape, format), load, rows, shape.head_dim == 256)
    }

    /// True if its kernels can round the output to FP8.
    pub fn rounds(&self, shape: HeadShape) -> bool {
        match self {
            Self::Fused(_) => shape.head_dim.is_multiple_of(BLOCK),
            Self::Separate(attention) => attention.rounds(shape),
        }
    }

    fn fused(gpu: &Gpu, (shape, format): (HeadShape, KvDType), load: &AttentionLoad, rows: usize, built: bool) -> Self {
        if built && matches!(shape.head_dim, 64 | 128 | 256) && shape.group() <= COLUMNS {
            // With FP8, four blocks per multiprocessor hide more latency than deep rings: 3.94 ms instead of 4.27 ms
            // for a step of 64 rows (Qwen3-4B, H200).
            let stages = match format {
                KvDType::Fp8 if shape.head_dim == 128 => 1,
                _ if !gpu.is_data_centre() => SMALL_STAGES,
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
    /// Chooses for `rows` rows, of at most `queries` queries each where few enough for decode attention. No context counts,
    /// so that a CUDA graph fits those of every later step.
    fn choose(gpu: &Gpu, shape: HeadShape, queries: usize, rows: usize) -> Self {
        // Rows of prefill do not count: twice the columns cost 3 us of 65 us per layer.
        let column_tiles = if queries * shape.group() <= COLUMNS { 1 } else { 2 };
        let stages = if shape.head_dim > LARGE_HEAD && gpu.is_data_centre() { 3 } else { SMALL_STAGES };
        Self::new(gpu, shape, rows, column_tiles, stages)
    }

    fn new(gpu: &Gpu, shape: HeadShape, rows: usize, column_tiles: usize, stages: usize) -> Self {
        let partial = Self::partial(shape, column_tiles);
        let slots = resident(gpu, stages) * gpu.multiprocessors;
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

/// Stages of a warp's ring that fit GPUs with 99 KB of shared memory a block.
pub(crate) const SMALL_STAGES: usize = 2;
/// Maximum bytes of shared memory of a block with that many.
pub(crate) const SMALL_BLOCK: usize = 80 << 10;

/// Blocks per multiprocessor that the grid is for.
fn resident(gpu: &Gpu, stages: usize) -> usize {
    if gpu.is_data_centre() { occupancy(stages) } else { (gpu.shared_memory / SMALL_BLOCK).max(1) }
}

/// Blocks per multiprocessor with 228 KB of shared memory, by it and by registers, with `stages` stages in each warp's ring.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_that_a_graph_keeps_suit_every_context() {
        let shape = HeadShape { heads: 32, kv_heads: 8, head_dim: 128 };
        for card in ["A100", "L4", "RTX 4090", "RTX 5090", "H100", "B200"] {
            let gpu = Gpu::named(card).unwrap();
            let choose =
                |context: usize| DecodeStep::choose(&gpu, shape, KvDType::Bf16, &AttentionLoad::of([(1, context)]), 1);
            assert_eq!(choose(1), choose(16_384), "{card}");
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
}
