//! The gated delta rule and the convolution before it.

use super::Gpu;
use crate::delta::{DeltaShape, TRITON_SEGMENTS, TRITON_TOKENS};
use crate::limits::delta::DIM;
use crate::limits::delta_chunks as limits;
use pegainfer_core::cuda::COUNTERS;

/// Longest chain of segments, in tokens, that the recurrence takes: decode rows in steps with prompts.
pub(crate) const RECURRENT_TOKENS: usize = 16;

/// Kernels of `ops::gated_delta_chunks`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaChunks {
    /// csrc/delta_rule/recurrent.cu, token by token: no chain is longer than [`RECURRENT_TOKENS`].
    Recurrent,
    /// GEMMs of chunks (csrc/delta_rule/intra.cu), then a scan over the chunks.
    Chunked {
        /// True if the recurrence also runs, for short chains of segments.
        recurrent: bool,
        /// The scan.
        scan: InterChunkScan,
    },
    /// triton/gated_delta.py, with twice as many blocks per head: for one prompt of about 1k tokens.
    Triton {
        /// True if the recurrence also runs, for short chains of segments.
        recurrent: bool,
    },
}

/// Blocks that share a head in the scan of triton/gated_delta.py: 128 / ROWS.
pub(crate) const TRITON_SLICES: usize = 4;

/// The kernel that carries the state from chunk to chunk (csrc/delta_rule/scan.cu).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InterChunkScan {
    /// True if it multiplies by warpgroups.
    pub wgmma: bool,
    /// Blocks that share a head.
    pub slices: usize,
    /// Blocks of the grid, each of which takes (head, slice, chain) in turn.
    pub blocks: usize,
    /// Threads of a block.
    pub threads: usize,
    /// Bytes of `ScanShared` in csrc/delta_rule/fetch.cuh.
    pub shared: usize,
}

impl DeltaChunks {
    /// Chooses for `tokens` tokens in `segments` segments.
    pub fn choose(gpu: &Gpu, shape: DeltaShape, tokens: usize, segments: usize) -> Self {
        if tokens <= RECURRENT_TOKENS {
            return Self::Recurrent;
        }
        // A single segment of many tokens has no short chain.
        let recurrent = segments > 1;
        if Self::is_for_triton(gpu, shape, tokens, segments) {
            return Self::Triton { recurrent };
        }
        Self::Chunked { recurrent, scan: InterChunkScan::choose(gpu, shape, tokens, segments) }
    }

    /// True if the Triton kernels are faster, that is, if all blocks of their scan run at once.
    fn is_for_triton(gpu: &Gpu, shape: DeltaShape, tokens: usize, segments: usize) -> bool {
        let at_once = shape.value_heads * TRITON_SLICES <= gpu.multiprocessors;
        let step = TRITON_TOKENS.contains(&tokens) && segments <= TRITON_SEGMENTS;
        gpu.triton && gpu.is_hopper() && at_once && step
    }

    /// True if the recurrence runs, alone or for short chains of segments.
    pub fn has_recurrence(&self) -> bool {
        matches!(self, Self::Recurrent | Self::Chunked { recurrent: true, .. } | Self::Triton { recurrent: true })
    }

    /// Name in records.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Recurrent => "recurrent",
            Self::Chunked { scan: InterChunkScan { wgmma: true, .. }, .. } => "chunked_wgmma",
            Self::Chunked { .. } => "chunked_mma",
            Self::Triton { .. } => "chunked_triton",
        }
    }
}

impl InterChunkScan {
    fn choose(gpu: &Gpu, shape: DeltaShape, tokens: usize, segments: usize) -> Self {
        let wgmma = gpu.is_hopper();
        // Blocks per multiprocessor.
        let (rows, resident, threads, shared) = match wgmma {
            true => (limits::WGMMA_SCAN_ROWS, 1, limits::WGMMA_SCAN_THREADS, limits::WGMMA_SCAN_BYTES),
            false => (limits::MMA_SCAN_ROWS, 2, limits::MMA_SCAN_THREADS, limits::MMA_SCAN_BYTES),
        };
        let slices = DIM / rows;
        let chains = segments.min(tokens / (RECURRENT_TOKENS + 1));
        let blocks = (shape.value_heads * slices * chains).min(resident * gpu.multiprocessors);
        Self { wgmma, slices, blocks, threads, shared }
    }
}

/// Kernels of `ops::decode_delta`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecodeDelta {
    /// csrc/delta_rule/decode.cu: convolution, rule and norm in one kernel.
    Fused,
    /// Each in a kernel.
    Separate,
}

impl DecodeDelta {
    /// Counters of a row's key head in csrc/delta_rule/decode.cu: the blocks that have read its convolution state.
    const READERS: usize = 2;

    /// Chooses for `rows` rows of one token; the fused kernel needs counters for each.
    pub fn choose(shape: DeltaShape, rows: usize) -> Self {
        if rows * shape.key_heads * Self::READERS <= COUNTERS { Self::Fused } else { Self::Separate }
    }

    /// Name in records.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Fused => "delta_fused",
            Self::Separate => "delta_separate",
        }
    }
}

/// Tokens of a tile of csrc/delta_rule/causal_conv.cu.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conv {
    /// 4.
    Short,
    /// 16.
    Long,
}

impl Conv {
    /// Number of tokens below which tiles are short. Only then are there enough tiles, and tokens of a tile that start
    /// their segments wait for their convolution states one after the other (640 tokens, 128 of them such, take 11 us
    /// on an H200 instead of 15 us).
    const MIN_TOKENS: usize = 1024;

    /// Chooses for `tokens` tokens.
    pub fn choose(tokens: usize) -> Self {
        if tokens < Self::MIN_TOKENS { Self::Short } else { Self::Long }
    }

    /// Name in records.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Short => "conv_4",
            Self::Long => "conv_16",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: DeltaShape =
        DeltaShape { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, conv_width: 4, tiled_output: false };

    #[test]
    fn there_are_counters_for_a_large_batch() {
        assert_eq!(DecodeDelta::choose(SHAPE, 512), DecodeDelta::Fused);
        assert_eq!(DecodeDelta::choose(SHAPE, 513), DecodeDelta::Separate);
    }

    #[test]
    fn triton_runs_one_prompt_of_about_1k_where_the_build_has_it() {
        let gpu = Gpu { triton: true, ..Gpu::named("H200").unwrap() };
        let name = |gpu: &Gpu, tokens, segments| DeltaChunks::choose(gpu, SHAPE, tokens, segments).name();
        assert_eq!(DeltaChunks::choose(&gpu, SHAPE, 1024, 1), DeltaChunks::Triton { recurrent: false });
        assert_eq!(DeltaChunks::choose(&gpu, SHAPE, 1024, 6), DeltaChunks::Triton { recurrent: true });
        for (tokens, segments) in [(100, 1), (319, 1), (1537, 1), (1024, 9)] {
            assert_eq!(name(&gpu, tokens, segments), "chunked_wgmma", "{tokens} {segments}");
        }
        assert_eq!(name(&Gpu { triton: false, ..gpu }, 1024, 1), "chunked_wgmma");
        assert_eq!(name(&Gpu { multiprocessors: 114, ..gpu }, 1024, 1), "chunked_wgmma", "not all blocks run at once");
        assert_eq!(name(&Gpu { triton: true, ..Gpu::named("A100").unwrap() }, 1024, 1), "chunked_mma");
    }

    #[test]
    fn every_gpu_has_the_shared_memory_of_the_scan() {
        for name in ["H200", "A100", "L4", "RTX 4090", "B200", "RTX 5090"] {
            let gpu = Gpu::named(name).unwrap();
            assert!(InterChunkScan::choose(&gpu, SHAPE, 512, 1).shared <= gpu.shared_memory, "{name}");
        }
    }
}
