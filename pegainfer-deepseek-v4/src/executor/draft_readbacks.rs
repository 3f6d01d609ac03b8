//! Readbacks of the drafts of rank 0.

use crate::bounds::StepBounds;
use crate::config::Config;
use pegainfer_runtime::Readbacks;
use pegainfer_runtime::block_drafting::BlockShape;

/// Readbacks of an executor for the drafts of its model.
#[derive(Debug)]
pub(super) struct DraftReadbacks {
    pub readbacks: Readbacks,
    /// Blocks of DSpark; `None` for multi-token prediction.
    pub blocks: Option<Blocks>,
}

/// Passes over blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Blocks {
    pub shape: BlockShape,
    /// Blocks of a pass.
    pub max_blocks: usize,
}

impl DraftReadbacks {
    /// Readbacks for the layers that `config` loads; `None` if it loads none. `logits_rows`: samples whose logits are
    /// computed at once.
    pub fn new(config: &Config, bounds: StepBounds, logits_rows: usize) -> Option<Self> {
        let dspark = config.loaded_dspark();
        let blocks =
            dspark.map(|dspark| Blocks { shape: dspark.block, max_blocks: bounds.blocks(dspark, logits_rows) });
        let samples = if blocks.is_some() { bounds.samples.min(logits_rows) } else { bounds.rows };
        config.loads_drafts.then(|| Self { readbacks: Readbacks::on_demand(samples), blocks })
    }
}
