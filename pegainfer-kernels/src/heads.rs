//! The heads of an attention layer, and the layout of their keys and values in the paged cache.

use pegainfer_core::exec::Device;
use pegainfer_core::tensor::{DType, Tensor};

/// Tokens of one KV block in the cache of every attention kernel.
pub const BLOCK_SIZE: usize = crate::limits::kv_cache::BLOCK;

/// Largest supported head, elements.
pub(crate) const MAX_HEAD_DIM: usize = 256;

/// Rows of 16 bytes after the codes of a KV block and head: the 16 scales of an FP8 cache.
pub(crate) const SCALE_ROWS: usize = BLOCK_SIZE * size_of::<f32>() / 16;

/// Element format of the KV cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KvDType {
    /// bf16.
    #[default]
    Bf16,
    /// FP8 e4m3 with an f32 scale for each token and KV head, of K and of V: `x = code * scale`. The scale is the
    /// largest magnitude of the head's row over 448 (1 if that is 0), and a code is the e4m3 value nearest to `x /
    /// scale`, ties to even. Keys are rounded after norm and rotation, values directly, both from bf16. The bytes of a
    /// token therefore depend only on that token, not on its neighbours in the block or on the step that wrote it.
    Fp8,
}

impl KvDType {
    /// The dtype of the cache's tensors. Codes and scales share one, as bytes.
    pub fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::Bf16,
            Self::Fp8 => DType::U8,
        }
    }

    /// Name in flags and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        }
    }

    /// The format of a cache tensor.
    pub(crate) fn of(cache: &Tensor) -> Self {
        if cache.dtype() == DType::U8 { Self::Fp8 } else { Self::Bf16 }
    }
}

/// Head counts and size of an attention layer.
///
/// One layer's cache is two arrays in blocks of [`BLOCK_SIZE`] tokens: K `[blocks, kv_heads, head_dim, 16]` (a vector
/// register holds one dimension of 16 tokens) and V `[blocks, kv_heads, 16, head_dim]` (a vector register holds 16
/// dimensions of one token). On a GPU both are `[blocks, kv_heads, 16, head_dim]`, and the order within the 16 tokens
/// of a head is the one of csrc/attention/kv_cache.cuh, which tensor cores read from shared memory. A token's slot is `block * 16
/// + offset`.
///
/// In FP8 both are `[blocks, kv_heads, head_dim + 4, 16]` bytes: the codes of a block and head in the order above, then
/// the 16 f32 scales of its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads; query head `j` uses KV head `j / group()`.
    pub kv_heads: usize,
    /// Elements of a head: a multiple of 16 from 32 to 256.
    pub head_dim: usize,
}

/// Parameters that turn projections of tokens into queries, keys and values, and the slots of the latter two.
#[derive(Debug, Clone, Copy)]
pub struct Heads<'a> {
    /// Head counts and size.
    pub shape: HeadShape,
    /// Weights of the RMS norms of a query and of a key, each `[head_dim]`.
    pub norms: (&'a Tensor, &'a Tensor),
    /// Added to the mean of the squares.
    pub eps: f32,
    /// Angles, see [`rope_table`](crate::ops::rope_table()).
    pub rope: &'a Tensor,
    /// Rows of `rope`, `[tokens]` u32: places of the tokens in their sequences, unless images before them move these;
    /// with gates also `[tokens, 3]`, time, row and column.
    pub positions: &'a Tensor,
    /// Slots of the tokens in the cache, `[tokens]` u32, each at most once, or `NO_SLOT` for a token whose key and
    /// value are not written.
    pub slots: &'a Tensor,
}

impl Heads<'_> {
    /// Positions of a token: 1 or 3.
    pub fn axes(&self) -> usize {
        if self.positions.shape().len() == 1 { 1 } else { 3 }
    }
}

/// Variant of [`Heads`] for a model without QK norm.
#[derive(Debug, Clone, Copy)]
pub struct RopeHeads<'a> {
    /// Head counts and size.
    pub shape: HeadShape,
    /// Angles, see [`rope_table`](crate::ops::rope_table()).
    pub rope: &'a Tensor,
    /// Places of the tokens in their sequences, `[tokens]` u32.
    pub positions: &'a Tensor,
    /// Slots of the tokens in the cache, see [`Heads::slots`].
    pub slots: &'a Tensor,
}

impl<'a> Heads<'a> {
    /// These heads without the norms.
    pub(crate) fn without_norms(&self) -> RopeHeads<'a> {
        let Self { shape, rope, positions, slots, .. } = *self;
        RopeHeads { shape, rope, positions, slots }
    }
}

impl HeadShape {
    /// True if the kernels support this shape; the fields list the limits.
    pub fn is_supported(&self) -> bool {
        let head_dim = self.head_dim.is_multiple_of(16) && (32..=MAX_HEAD_DIM).contains(&self.head_dim);
        head_dim && self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads)
    }

    /// Query heads per KV head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Columns of the fused projection: queries, keys, values.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Columns of the fused projection with gates: for each head its query, then its gate; then keys, values.
    pub fn gated_qkv_width(&self) -> usize {
        (2 * self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Columns of the queries, and of the attention output.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Rows of 16 elements that one KV head has in a block, of K and of V.
    pub(crate) fn slab_rows(&self, dtype: KvDType) -> usize {
        match dtype {
            KvDType::Bf16 => self.head_dim,
            KvDType::Fp8 => self.head_dim + SCALE_ROWS,
        }
    }

    /// Elements of one block of K, and of one block of V.
    pub fn block_len(&self, dtype: KvDType) -> usize {
        self.kv_heads * self.slab_rows(dtype) * BLOCK_SIZE
    }

    /// Bytes of K and V of one token in one layer.
    pub fn kv_bytes_per_token(&self, dtype: KvDType) -> usize {
        2 * self.kv_heads * self.slab_rows(dtype) * dtype.dtype().size()
    }

    /// Shapes of one layer's cache of `blocks` blocks on this device, K and V; see [`HeadShape`].
    pub fn cache(&self, device: Device, dtype: KvDType, blocks: usize) -> [[usize; 4]; 2] {
        let tokens_last = [blocks, self.kv_heads, self.slab_rows(dtype), BLOCK_SIZE];
        let dims_last = [blocks, self.kv_heads, BLOCK_SIZE, self.head_dim];
        match (dtype, device) {
            (KvDType::Fp8, _) => [tokens_last; 2],
            (KvDType::Bf16, Device::Cpu(_) | Device::Meta) => [tokens_last, dims_last],
            (KvDType::Bf16, Device::Cuda) => [dims_last; 2],
        }
    }

    /// Index on the CPU of element `i` of the GPU's cache, of K or of V.
    pub(crate) fn cpu_index(&self, keys: bool, i: usize) -> usize {
        let slab = BLOCK_SIZE * self.head_dim;
        let (half, token, column) = (i % slab / (64 * BLOCK_SIZE), i / 64 % BLOCK_SIZE, i % 64);
        let dim = 64 * half + 8 * ((column / 8) ^ (token % 8)) + column % 8;
        let inner = if keys { dim * BLOCK_SIZE + token } else { token * self.head_dim + dim };
        i / slab * slab + inner
    }

    /// Index on the CPU of byte `i` of the GPU's FP8 cache, of K or of V.
    pub(crate) fn cpu_byte(&self, keys: bool, i: usize) -> usize {
        let (slab, codes) = (BLOCK_SIZE * self.slab_rows(KvDType::Fp8), BLOCK_SIZE * self.head_dim);
        let at = i % slab;
        if at >= codes {
            return i;
        }
        let (column, token) = (at / (64 * BLOCK_SIZE), at / 64 % BLOCK_SIZE);
        let dim = 64 * column + 16 * ((at % 64 / 16) ^ (token / 2 % 4)) + at % 16;
        let inner = if keys { dim * BLOCK_SIZE + token } else { token * self.head_dim + dim };
        i / slab * slab + inner
    }

    /// For byte `i` of an FP8 cache: the token of a block whose scale contains it, and its position in the scale;
    /// `None` for a code.
    pub(crate) fn scale_byte(&self, i: usize) -> Option<(usize, usize)> {
        let at = i % (BLOCK_SIZE * self.slab_rows(KvDType::Fp8));
        let byte = at.checked_sub(BLOCK_SIZE * self.head_dim)?;
        Some((byte / size_of::<f32>(), byte % size_of::<f32>()))
    }

    /// The first of the [`slab_rows`](Self::slab_rows) that one KV head has in a block, of K and of V.
    pub(crate) fn first_row(&self, dtype: KvDType, block: usize, kv_head: usize) -> usize {
        (block * self.kv_heads + kv_head) * self.slab_rows(dtype)
    }

    /// First element of a token's key in K of the CPU; the others follow at a stride of [`BLOCK_SIZE`].
    pub(crate) fn key(&self, dtype: KvDType, slot: usize, kv_head: usize) -> usize {
        self.first_row(dtype, slot / BLOCK_SIZE, kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    }

    /// First element of a token's value in V of the CPU; the others follow.
    pub(crate) fn value(&self, dtype: KvDType, slot: usize, kv_head: usize) -> usize {
        self.first_row(dtype, slot / BLOCK_SIZE, kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE * self.head_dim
    }

    /// First byte of a token's scale in K and in V of an FP8 cache.
    pub(crate) fn scale(&self, slot: usize, kv_head: usize) -> usize {
        let row = self.first_row(KvDType::Fp8, slot / BLOCK_SIZE, kv_head) + self.head_dim;
        row * BLOCK_SIZE + slot % BLOCK_SIZE * size_of::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gpu_layout_is_a_permutation_of_the_cpu_layout() {
        let shape = HeadShape { heads: 4, kv_heads: 2, head_dim: 128 };
        let elements = 3 * shape.block_len(KvDType::Bf16);
        for keys in [true, false] {
            let mut seen = vec![false; elements];
            (0..elements).for_each(|i| seen[shape.cpu_index(keys, i)] = true);
            assert!(seen.iter().all(|&s| s));
        }
        let bytes = 3 * shape.block_len(KvDType::Fp8);
        for keys in [true, false] {
            let mut seen = vec![false; bytes];
            (0..bytes).for_each(|i| seen[shape.cpu_byte(keys, i)] = true);
            assert!(seen.iter().all(|&s| s));
        }
        // Token 2, dimension 64 of the second head of block 0: column 1, codes 0 at place 1.
        let i = shape.block_len(KvDType::Fp8) / 2 + 16 * 64 + 2 * 64 + 16;
        assert_eq!(shape.cpu_byte(true, i), shape.key(KvDType::Fp8, 2, 1) + 64 * BLOCK_SIZE);
        assert_eq!(shape.cpu_byte(false, i), shape.value(KvDType::Fp8, 2, 1) + 64);
        assert_eq!(shape.scale_byte(i), None);
        let i = shape.scale(2, 1) + 3;
        assert_eq!((shape.cpu_byte(true, i), shape.scale_byte(i)), (i, Some((2, 3))));
        // Token 1, dimension 64 of the second head of block 0: half 1, row 1, vector 0 at place 1.
        let i = shape.block_len(KvDType::Bf16) / 2 + 16 * 64 + 64 + 8;
        assert_eq!(shape.cpu_index(true, i), shape.key(KvDType::Bf16, 1, 1) + 64 * BLOCK_SIZE);
        assert_eq!(shape.cpu_index(false, i), shape.value(KvDType::Bf16, 1, 1) + 64);
    }
}
