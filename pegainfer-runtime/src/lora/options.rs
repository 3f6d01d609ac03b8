//! Sizes of an engine's slots for adapters.

use pegainfer_kernels::ops::lora::RANK_MULTIPLE;

/// Sizes of an engine's slots for adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoraOptions {
    /// Slots on each device: maximum number of distinct adapters in a step.
    pub max_loras: usize,
    /// Maximum rank of an adapter; a slot has memory for it, rounded up.
    pub max_rank: usize,
}

/// Rank of a slot for adapters of up to `max_rank`.
pub(super) fn slot_rank(max_rank: usize) -> usize {
    max_rank.next_multiple_of(RANK_MULTIPLE)
}
