//! Passes of the layers that draft, after a step.

use super::Executor;
use super::draft_readbacks::{Blocks, DraftReadbacks};
use super::rank::{PassKind, Rank};
use crate::plan::{self, NO_STATE, PAGE_TOKENS, Segment, Step};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::OpError;
use pegainfer_runtime::block_drafting::{self, BlockRow, BlockShape};
use pegainfer_runtime::drafting::{self, DraftRow};

impl Executor {
    /// Enqueues the draft passes after `step`, whose samples drew `drawn`, and waits for the drafts of each row. Empty
    /// if no layers that draft are loaded.
    pub(super) fn draft(&mut self, step: &Step, drawn: &[u32]) -> Result<Vec<Vec<u32>>, OpError> {
        match self.drafting.as_ref().map(|drafting| drafting.blocks) {
            None => Ok(Vec::new()),
            Some(None) => self.draft_autoregressively(step, drawn),
            Some(Some(blocks)) => self.draft_blocks(step, drawn, blocks),
        }
    }

    /// The record of every op of rank 0 in a pass of DSpark's stages over `blocks` blocks after `context` tokens each.
    pub fn record_blocks(&mut self, blocks: usize, context: usize) -> (Result<(), OpError>, Vec<OpRecord>) {
        let mut step = plan::uniform(blocks, 1, context);
        if let Some(Blocks { shape, .. }) = self.drafting.as_ref().and_then(|drafting| drafting.blocks) {
            step.rows.iter_mut().for_each(|row| row.model_drafts = shape.tokens);
        }
        self.ranks.first_mut().exec.start_recording();
        let drafted = self.draft(&step, &vec![0; blocks]);
        (drafted.map(drop), self.ranks.first_mut().exec.stop_recording())
    }

    /// Multi-token prediction: a pass finds the drafts of the one before on the device.
    fn draft_autoregressively(&mut self, step: &Step, drawn: &[u32]) -> Result<Vec<Vec<u32>>, OpError> {
        let (mut pass, rows) = drafting::first_pass(step, drawn);
        let passes = drafting::passes(&rows);
        for i in 0..passes.max(1) {
            if i > 0 {
                pass = next_pass(step, &rows, i);
            }
            self.enqueue(PassKind::Draft { again: i > 0 }, &pass)?;
            self.draw(PassKind::Draft { again: i > 0 }, &pass)?;
            let Rank { exec, sampler, .. } = self.ranks.first_mut();
            if let Some(drafting) = self.drafting.as_mut().filter(|_| !pass.samples.is_empty()) {
                drafting.readbacks.start(exec, sampler, &pass.samples)?;
            }
        }
        let Some(DraftReadbacks { readbacks, .. }) = &mut self.drafting else { return Ok(Vec::new()) };
        drafting::finish(readbacks, step.rows.len(), &rows, passes)
    }

    /// DSpark: one pass over the blocks of all rows, or a few if they are more than `most`.
    fn draft_blocks(
        &mut self,
        step: &Step,
        drawn: &[u32],
        Blocks { shape, max_blocks }: Blocks,
    ) -> Result<Vec<Vec<u32>>, OpError> {
        let rows = block_drafting::block_rows(step, drawn, shape);
        let mut pass_rows = Vec::new();
        for rows in rows.chunks(max_blocks) {
            let pass = block_pass(step, rows, shape);
            let graph = self.ranks.first().graph_shape(PassKind::Blocks, &pass);
            let padded = graph.map_or(rows.len(), |shape| shape.rows);
            self.enqueue(PassKind::Blocks, &pass)?;
            let samples = vec![pass.samples[0].clone(); padded * block_drafting::block_positions(rows)];
            let Rank { exec, sampler, .. } = self.ranks.first_mut();
            if let Some(drafting) = &mut self.drafting {
                drafting.readbacks.start(exec, sampler, &samples)?;
            }
            pass_rows.push(padded);
        }
        let mut drafts = vec![Vec::new(); step.rows.len()];
        let Some(drafting) = &mut self.drafting else { return Ok(drafts) };
        for pass in rows.chunks(max_blocks).zip(pass_rows) {
            block_drafting::finish(&mut drafting.readbacks, pass, &mut drafts)?;
        }
        Ok(drafts)
    }
}

/// The pass over the blocks of `rows`, see [`block_drafting::block_pass`], with the state slots of its rows.
fn block_pass(step: &Step, rows: &[BlockRow], shape: BlockShape) -> Step {
    let mut pass = block_drafting::block_pass(step, rows, shape);
    let segment = |(row, ends): (&BlockRow, &[u32])| {
        let slot = step.state[row.draft.row].to;
        Segment { first: ends[0], end: ends[1], from: slot, to: slot }
    };
    pass.state = rows.iter().zip(pass.qo_indptr.windows(2)).map(segment).collect();
    pass
}

/// Pass `pass`, from 1 on, of the layer that drafts after `step`, with the state slots of its rows; see
/// [`drafting::next_pass`]. A row that needs no more drafts has none.
fn next_pass(step: &Step, rows: &[DraftRow], pass: usize) -> Step {
    let mut next = drafting::next_pass(step, rows, pass, PAGE_TOKENS);
    let segment = |(row, first): (&DraftRow, u32)| {
        let slot = if pass < row.count { step.state[row.row].to } else { NO_STATE };
        Segment { first, end: first + 1, from: slot, to: slot }
    };
    next.state = rows.iter().zip(0..).map(segment).collect();
    next
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use crate::numerics::Numerics;
    use crate::testing::flash;
    use crate::{record, record_blocks};

    #[test]
    fn dspark_of_the_official_shapes_adds_few_launches_to_a_step_and_has_one_pass() {
        let config = Config { loads_drafts: true, ..flash(true) };
        for ranks in [1, 2] {
            let step = record(&config, Numerics::REFERENCE, ranks, (4, 6, 3000)).unwrap();
            let pass = record_blocks(&config, Numerics::REFERENCE, ranks, (4, 3000)).unwrap();
            let count = |op: &str| [&step, &pass].map(|records| records.iter().filter(|r| r.op == op).count());
            assert_eq!((count("mean_streams"), count("write_ring")), ([3, 0], [3, 0]));
            assert_eq!((count("sparse_attention"), count("add")), ([43, 3], [0, 5]));
            assert_eq!(count("sample"), [1, 5]);
        }
    }
}
