//! Sources of weights.

use pegainfer_core::weights::Checkpoint;

/// Where weights come from.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// Files of a checkpoint.
    Checkpoint(&'a Checkpoint),
    /// Random values of this seed.
    Dummy(u64),
}
