//! The ragged batch of an attention call.

use crate::load::AttentionLoad;
use pegainfer_core::tensor::Tensor;

/// A ragged batch of prefill chunks and decode tokens: which rows attend to which blocks.
#[derive(Debug)]
pub struct AttentionBatch<'a> {
    /// Row `b` owns queries `qo_indptr[b]..qo_indptr[b + 1]`; `[batch + 1]` u32.
    pub qo_indptr: &'a Tensor,
    /// Tokens each row attends to, its own queries included; `[batch]` u32.
    pub kv_lens: &'a Tensor,
    /// Blocks of each row in token order; `[batch, max_blocks]` u32.
    pub block_tables: &'a Tensor,
    /// Sizes of the rows, known to the host.
    pub load: AttentionLoad,
}
