//! Sources of weights.

use pegainfer_core::weights::Checkpoint;

/// Source of weights.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// Files of a checkpoint.
    Checkpoint(&'a Checkpoint),
    /// Random values of this seed.
    Dummy(u64),
}
