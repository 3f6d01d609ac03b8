//! Prefill over an FP8 KV cache: how much of it is widened to bf16 at a time.

use crate::heads::{BLOCK_SIZE, HeadShape, KvDType};
use crate::load::AttentionLoad;
use pegainfer_core::cuda::WORKSPACE_BYTES;

/// Widening of an FP8 cache in the workspace by csrc/attention/widen_kv.cu: some KV heads at a time, each followed by
/// attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Widening {
    /// Most KV heads at a time.
    pub kv_heads: usize,
    /// KV blocks of all rows, at least.
    pub kv_blocks: usize,
    /// Offset of the keys in the workspace, in bytes; the values follow them. Partial results of decode attention
    /// precede them.
    pub first_byte: usize,
}

impl Widening {
    /// Alignment of slabs of the KV cache in bytes: 16 rows of 64 dimensions in bf16.
    pub(super) const ALIGNMENT: usize = 2048;

    /// For `rows` rows, some of which may decode, after the first `used` bytes of the workspace; `None` if it is too
    /// small for one KV head.
    pub(super) fn choose(shape: HeadShape, load: &AttentionLoad, rows: usize, used: usize) -> Option<Self> {
        let first_byte = used.next_multiple_of(Self::ALIGNMENT);
        // A row's last block may be partly used.
        let tokens = (load.cached - load.decode_context) as usize;
        let kv_blocks = tokens / BLOCK_SIZE + rows - load.decode_rows;
        let head_bytes = shape.kv_bytes_per_token(KvDType::Bf16) / shape.kv_heads * BLOCK_SIZE;
        let most = WORKSPACE_BYTES.saturating_sub(first_byte) / (kv_blocks * head_bytes).max(1);
        let passes = shape.kv_heads.div_ceil(most.clamp(1, shape.kv_heads));
        (most > 0).then(|| Self { kv_heads: shape.kv_heads.div_ceil(passes), kv_blocks, first_byte })
    }
}
