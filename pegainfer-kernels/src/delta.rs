//! The heads of a gated delta rule layer (linear attention), and their state per sequence.

use crate::limits::delta_chunks::{CHUNK, INTRA_CHUNK_BYTES};
pub use pegainfer_core::schedule::{NO_STATE, SEGMENT_WORDS, Segment};
use std::ops::RangeInclusive;

/// Maximum width of the convolution.
pub(crate) const MAX_CONV_WIDTH: usize = 8;

/// Steps of one prompt, in tokens, for which the Triton kernels of `ops::gated_delta_chunks` are faster than the CUDA
/// kernels. Microseconds per layer on an H200 with 32 heads, CUDA / Triton: 14.9 / 15.6 for 100 tokens, 42.9 / 40.7 for
/// 1,024 and 133 / 143 for 4,096 (docs/benchmarks/h200-qwen35-4b.md). Linear interpolation crosses at 323 and 1,579.
pub(crate) const TRITON_TOKENS: RangeInclusive<usize> = 320..=1536;
/// Maximum number of segments of such a step: a copy of the state every 256 tokens, one at the last full block, and the
/// end.
pub(crate) const TRITON_SEGMENTS: usize = 8;

/// Head counts and sizes of a gated delta rule layer.
///
/// One projection gives all inputs of a token: `[q | k | v | z | b | a]`, where `q` and `k` are `[key_heads, key_dim]`,
/// `v` and the output gate `z` are `[value_heads, value_dim]`, and `b` and `a`, from which write strength and decay are
/// computed, are `[value_heads]`. The convolution runs over the channels of q, k and v.
///
/// The state of a sequence lives in a slot: the memory matrices `[value_heads, value_dim, key_dim]` f32, and the
/// convolution state, the last `conv_width - 1` inputs of the convolution, `[conv_width - 1, channels]` bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaShape {
    /// Heads of q and k.
    pub key_heads: usize,
    /// Heads of v, a multiple of `key_heads`; value head `h` uses key head `h / group()`.
    pub value_heads: usize,
    /// Elements of a head of q and k: a multiple of 16.
    pub key_dim: usize,
    /// Elements of a head of v: a multiple of 16.
    pub value_dim: usize,
    /// Width of the convolution, 2 to 8.
    pub conv_width: usize,
    /// True if the layer's output has its heads in the order of GGUF files, see [`output_head`](Self::output_head).
    pub tiled_output: bool,
}

impl DeltaShape {
    /// True if the kernels support this shape; the fields list the limits.
    pub fn is_supported(&self) -> bool {
        let dim = |n: usize| n > 0 && n.is_multiple_of(16);
        let heads = self.key_heads > 0 && self.value_heads > 0 && self.value_heads.is_multiple_of(self.key_heads);
        dim(self.key_dim) && dim(self.value_dim) && heads && (2..=MAX_CONV_WIDTH).contains(&self.conv_width)
    }

    /// Value heads per key head.
    pub fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// Place of value head `h` in the layer's output. It is `h`, unless the columns of the output projection are tiled:
    /// then the first heads of all key heads come first, then the second ones, and so on. Columns of quantised matrices
    /// cannot be moved, because a block may hold those of two heads.
    pub fn output_head(&self, h: usize) -> usize {
        let group = self.output_group();
        h % group * (self.value_heads / group) + h / group
    }

    /// Neighbouring heads that the output separates: 1 keeps their order.
    pub fn output_group(&self) -> usize {
        if self.tiled_output { self.group() } else { 1 }
    }

    /// Columns of q, and of k.
    pub fn k_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Columns of v, of z and of the output.
    pub fn v_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Columns of q, k and v together.
    pub fn channels(&self) -> usize {
        2 * self.k_width() + self.v_width()
    }

    /// Columns of the projection, a multiple of 8, which the GPU kernels need; few heads are followed by columns of
    /// zeros.
    pub fn projected_width(&self) -> usize {
        (self.channels() + self.v_width() + 2 * self.value_heads).next_multiple_of(8)
    }

    /// Columns of zeros at the end of the projection.
    pub fn padding(&self) -> usize {
        self.projected_width() - self.channels() - self.v_width() - 2 * self.value_heads
    }

    /// First columns of z, b and a in the projection.
    pub(crate) fn gates(&self) -> [usize; 3] {
        let b = self.channels() + self.v_width();
        [self.channels(), b, b + self.value_heads]
    }

    /// Shape of the memory matrices of `slots` slots, f32.
    pub fn states(&self, slots: usize) -> [usize; 4] {
        [slots, self.value_heads, self.value_dim, self.key_dim]
    }

    /// Shape of the convolution states of `slots` slots, bf16.
    pub fn conv_states(&self, slots: usize) -> [usize; 3] {
        [slots, self.conv_width - 1, self.channels()]
    }

    /// Most chunks of 64 tokens, each within a segment, of `tokens` tokens in `segments` segments.
    pub(crate) fn chunks(tokens: usize, segments: usize) -> usize {
        tokens / CHUNK + segments
    }

    /// Bytes of scratch for `ops::gated_delta_chunks` on a GPU, for steps of up to `tokens` tokens in `segments`
    /// segments: matrices of `[64, 64]` in bf16, for solving and for reading. The CUDA kernels keep only the lower
    /// halves.
    pub fn chunk_scratch(&self, tokens: usize, segments: usize) -> usize {
        // `IntraChunk` and `Chains` in csrc/delta_rule/chunks.cuh.
        let cuda = Self::chunks(tokens, segments) * self.value_heads * INTRA_CHUNK_BYTES + 4 * (2 + segments);
        if !cfg!(triton_kernels) {
            return cuda;
        }
        // `solve`, `weights` and `scales` in triton/gated_delta.py.
        let (tokens, segments) = (tokens.min(*TRITON_TOKENS.end()), segments.min(TRITON_SEGMENTS));
        cuda.max(Self::chunks(tokens, segments) * self.value_heads * (2 * 64 * 64 * 2 + 4 * 64 * 4))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_core::rng;

    #[test]
    fn chunks_have_numbers_of_their_own() {
        for case in 0..200 {
            let cut = |i: usize| (rng::bits(case, i as u64) % 150) as usize;
            let (mut first, mut free, segments) = (0, 0, 1 + cut(0) % 40);
            for i in 0..segments {
                let end = first + cut(i + 1);
                // The numbering of csrc/delta_rule/chunks.cuh.
                let number = first / CHUNK + i;
                assert!(number >= free);
                (first, free) = (end, number + (end - first).div_ceil(CHUNK));
            }
            assert!(free <= DeltaShape::chunks(first, segments));
        }
    }
}
