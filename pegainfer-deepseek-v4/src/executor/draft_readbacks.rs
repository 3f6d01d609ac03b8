//! Readbacks of the drafts of rank 0.

use crate::bounds::StepBounds;
use crate::config::{Config, DSpark};
use pegainfer_kernels::runtime::block_drafting::{BlockDrafting, BlockShape};
use pegainfer_kernels::runtime::drafting::Drafting;

/// What an executor keeps for the drafts of its model.
#[derive(Debug)]
pub(super) enum DraftReadbacks {
    /// Of multi-token prediction.
    Mtp(Drafting),
    /// Of DSpark.
    Blocks {
        readbacks: BlockDrafting,
        shape: BlockShape,
        /// Blocks of a pass at most.
        most: usize,
    },
}

impl DraftReadbacks {
    /// For the layers that `config` loads; `None` if it loads none. `logits_rows`: samples whose logits are computed at once.
    pub fn new(config: &Config, bounds: StepBounds, logits_rows: usize) -> Option<Self> {
        let blocks = |dspark: &DSpark| {
            let (shape, most) = (dspark.block, bounds.blocks(dspark, logits_rows));
            Self::Blocks { readbacks: BlockDrafting::new(bounds.samples.min(logits_rows)), shape, most }
        };
        let mtp = || Self::Mtp(Drafting::new(bounds.rows));
        config.loads_drafts.then(|| config.loaded_dspark().map_or_else(mtp, blocks))
    }
}
