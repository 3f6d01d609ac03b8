//! One step's work: all of Qwen3's state is in KV blocks, so a step needs nothing else.

use pegainfer_core::schedule;
pub use pegainfer_core::schedule::{Outcome, PLACEHOLDER, SampleRow, StepRow};
use pegainfer_kernels::ops::BLOCK_SIZE;

/// One step's work, as the scheduler hands it to the executor.
pub type Step = schedule::Step;

/// `schedule::Step::uniform` in the block size of the attention kernels.
pub fn uniform(batch: usize, tokens: usize, context: usize) -> Step {
    Step::uniform(BLOCK_SIZE, batch, tokens, context)
}

/// `schedule::Step::ragged` in the block size of the attention kernels.
pub fn ragged(rows: &[(usize, usize)]) -> Step {
    Step::ragged(BLOCK_SIZE, rows)
}
