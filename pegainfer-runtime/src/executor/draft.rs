//! Passes of the layers that draft, after a step.

use super::Executor;
use crate::block_drafting;
use crate::block_shape::BlockShape;
use crate::drafting;
use crate::model::{Model, StepOf};
use crate::pass_kind::PassKind;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::OpError;

impl<M: Model> Executor<M> {
    /// Launches the draft passes after `step`, which drew `drawn`, and waits for the drafts of each row. None if no
    /// layers that draft are loaded.
    pub(super) fn draft(&mut self, step: &StepOf<M>, drawn: &[u32]) -> Result<Vec<Vec<u32>>, OpError> {
        match (&self.drafting, self.blocks) {
            (None, _) => Ok(Vec::new()),
            (Some(_), None) => self.draft_tokens(step, drawn),
            (Some(_), Some(blocks)) => self.draft_blocks(step, drawn, blocks),
        }
    }

    /// Multi-token prediction: a pass finds the drafts of the one before on the device.
    fn draft_tokens(&mut self, step: &StepOf<M>, drawn: &[u32]) -> Result<Vec<Vec<u32>>, OpError> {
        let (mut pass, rows) = drafting::first_pass(step, drawn);
        let passes = drafting::passes(&rows);
        for i in 0..passes.max(1) {
            if i > 0 {
                pass = drafting::next_pass(step, &rows, i, M::BLOCK_TOKENS);
                M::add_draft_rows(&mut pass, step, &rows.iter().map(|row| row.row).collect::<Vec<_>>());
            }
            let kind = PassKind::Drafts { again: i > 0 };
            self.enqueue(kind, &pass)?;
            self.draw(kind, &pass)?;
        }
        let Some(readbacks) = &mut self.drafting else { return Ok(Vec::new()) };
        drafting::finish(readbacks, step.rows.len(), &rows, passes)
    }

    /// One pass over the blocks of all rows, or a few if there are more than `max_blocks`.
    fn draft_blocks(
        &mut self,
        step: &StepOf<M>,
        drawn: &[u32],
        (shape, max_blocks): (BlockShape, usize),
    ) -> Result<Vec<Vec<u32>>, OpError> {
        let rows = block_drafting::block_rows(step, drawn, shape);
        let mut pass_rows = Vec::new();
        for rows in rows.chunks(max_blocks) {
            let mut pass = block_drafting::block_pass(step, rows, shape);
            M::add_draft_rows(&mut pass, step, &rows.iter().map(|row| row.draft.row).collect::<Vec<_>>());
            let padded = self.enqueue(PassKind::Blocks, &pass)?.map_or(rows.len(), |key| key.shape.rows);
            let samples = vec![pass.samples[0].clone(); padded * block_drafting::block_positions(rows)];
            let (exec, sampler, _) = self.ranks.first_mut().sampler(PassKind::Blocks);
            if let Some(readbacks) = &mut self.drafting {
                readbacks.start(exec, sampler, None, &samples)?;
            }
            pass_rows.push(padded);
        }
        let mut drafts = vec![Vec::new(); step.rows.len()];
        let Some(readbacks) = &mut self.drafting else { return Ok(drafts) };
        for pass in rows.chunks(max_blocks).zip(pass_rows) {
            block_drafting::finish(readbacks, pass, &mut drafts)?;
        }
        Ok(drafts)
    }

    /// The record of every op of rank 0 in the draft passes after `step`.
    pub(crate) fn record_drafts(&mut self, step: &StepOf<M>) -> (Result<(), OpError>, Vec<OpRecord>) {
        self.exec().start_recording();
        let drafted = self.draft(step, &vec![0; step.samples.len()]);
        (drafted.map(drop), self.exec().stop_recording())
    }
}
