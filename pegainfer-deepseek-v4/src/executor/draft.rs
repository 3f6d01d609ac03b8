//! The passes of the layer that drafts behind a step.

use super::Executor;
use super::rank::{Part, Rank};
use crate::plan::{NO_STATE, PAGE_TOKENS, Segment, Step};
use pegainfer_core::tensor::OpError;
use pegainfer_kernels::runtime::drafting::{self, DraftRow};

impl Executor {
    /// Enqueues the passes of the layer that drafts behind `step`, whose samples drew `drawn`, and waits for the drafts of each row. A
    /// pass finds the drafts of the one before on the device. Empty if that layer is not loaded.
    pub(super) fn draft(&mut self, step: &Step, drawn: &[u32]) -> Result<Vec<Vec<u32>>, OpError> {
        if self.drafting.is_none() {
            return Ok(Vec::new());
        }
        let (mut pass, rows) = drafting::first_pass(step, drawn);
        let passes = drafting::passes(&rows);
        for i in 0..passes.max(1) {
            if i > 0 {
                pass = next_pass(step, &rows, i);
            }
            self.enqueue(Part::Draft { again: i > 0 }, &pass)?;
            let Rank { exec, sampler, .. } = self.ranks.first_mut();
            if let Some(drafting) = self.drafting.as_mut().filter(|_| !pass.samples.is_empty()) {
                drafting.start_readback(exec, sampler, &pass.samples, i)?;
            }
        }
        self.drafting.as_mut().map_or(Ok(Vec::new()), |drafting| drafting.finish(step.rows.len(), &rows, passes))
    }
}

/// Pass `pass`, from 1 on, of the layer that drafts behind `step`, see [`drafting::next_pass`], with the state slots of its rows. A row
/// that wants no more drafts has none.
fn next_pass(step: &Step, rows: &[DraftRow], pass: usize) -> Step {
    let mut next = drafting::next_pass(step, rows, pass, PAGE_TOKENS);
    let segment = |(row, first): (&DraftRow, u32)| {
        let slot = if pass < row.count { step.state[row.row].to } else { NO_STATE };
        Segment { first, end: first + 1, from: slot, to: slot }
    };
    next.state = rows.iter().zip(0..).map(segment).collect();
    next
}
