//! Block drafting (DSpark): one pass after a step gives all drafts of a sequence.
//!
//! A block is a fixed number of positions after the anchor, the newest accepted token. Its first input is the token
//! sampled there; the others are a noise token. Layers run over all positions at once, and tokens are then drawn one
//! after the other.

use super::block_shape::BlockShape;
use super::drafting::{DraftRow, first_pass};
use super::readbacks::Readbacks;
use pegainfer_core::kv::NO_SLOT;
use pegainfer_core::schedule::{SampleRow, Step};
use pegainfer_core::tensor::OpError;

/// A row of a step after which the model drafts a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRow {
    /// The row, its anchor, and how many drafts are wanted.
    pub draft: DraftRow,
    /// Token sampled after the anchor.
    pub first_token: u32,
}

/// The rows of `step`, whose samples drew `drawn`, after which the model drafts. Excludes rows with a context shorter
/// than a block.
pub fn block_rows<R: Clone + Default>(step: &Step<R>, drawn: &[u32], shape: BlockShape) -> Vec<BlockRow> {
    let (shifted, rows) = first_pass(step, drawn);
    let row = |draft: DraftRow| BlockRow { draft, first_token: shifted.tokens[draft.token] };
    let is_long = |draft: &DraftRow| step.positions[draft.token] as usize + 1 >= shape.tokens;
    rows.into_iter().filter(is_long).map(row).collect()
}

/// Drafts of the longest block of `rows`.
pub fn block_positions(rows: &[BlockRow]) -> usize {
    rows.iter().map(|row| row.draft.count).max().unwrap_or(0)
}

/// The pass over the blocks of `rows` after `step`, one block per row; tokens are drawn at its first positions. Samples
/// are ordered by position, then by row. `state` stays empty.
pub fn block_pass<R: Clone + Default>(step: &Step<R>, rows: &[BlockRow], shape: BlockShape) -> Step<R> {
    let mut pass = Step { qo_indptr: vec![0], ..Step::default() };
    for BlockRow { draft, first_token } in rows {
        let anchor = step.positions[draft.token];
        let noise = std::iter::repeat_n(shape.noise_token, shape.tokens - 1);
        pass.tokens.extend(std::iter::once(*first_token).chain(noise));
        pass.positions.extend((1..=shape.tokens as u32).map(|i| anchor + i));
        // The model keeps nothing of a block.
        pass.slots.extend(std::iter::repeat_n(NO_SLOT, shape.tokens));
        pass.qo_indptr.push(pass.tokens.len() as u32);
        pass.kv_lens.push(anchor + 1 + shape.tokens as u32);
        pass.block_tables.push(step.block_tables[draft.row].clone());
        pass.rows.push(step.rows[draft.row]);
    }
    let places = (0..block_positions(rows)).flat_map(|i| (0..rows.len()).map(move |b| b * shape.tokens + i));
    pass.samples = places.map(|token| SampleRow::of_padding(token as u32)).collect();
    pass
}

/// Waits for the tokens of the oldest pass over blocks: those of the first position of each of its `pass_rows` rows,
/// which start with `rows`, then those of the second position, and so on. Appends those of `rows` to the `drafts` of
/// their rows of the step.
pub fn finish(
    readbacks: &mut Readbacks,
    (rows, pass_rows): (&[BlockRow], usize),
    drafts: &mut [Vec<u32>],
) -> Result<(), OpError> {
    let tokens = readbacks.finish()?.tokens;
    for (b, BlockRow { draft, .. }) in rows.iter().enumerate() {
        drafts[draft.row] = tokens.iter().skip(b).step_by(pass_rows).take(draft.count).copied().collect();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_kernels::ops::BLOCK_SIZE;

    const SHAPE: BlockShape = BlockShape { tokens: 3, noise_token: 99 };

    /// A row of three drafts of which one is accepted, one of a short prompt, and one of a longer prompt.
    fn step() -> (Step, Vec<u32>) {
        let mut step = Step::<()>::ragged(BLOCK_SIZE, &[(4, 32), (2, 2), (2, 9)]);
        step.tokens = vec![20, 21, 22, 23, 30, 31, 40, 41];
        (step.rows[0].drafts, step.rows[0].model_drafts) = (3, 1);
        (step.rows[1].model_drafts, step.rows[2].model_drafts) = (2, 2);
        let sample = |token: usize| SampleRow { token: token as u32, ..step.samples[0].clone() };
        let samples = [0, 1, 2, 3, 5, 7].map(sample).to_vec();
        (Step { samples, ..step }, vec![21, 50, 51, 52, 60, 70])
    }

    #[test]
    fn blocks_begin_behind_the_newest_token_that_counts() {
        let (step, drawn) = step();
        let rows = block_rows(&step, &drawn, SHAPE);
        let found: Vec<_> = rows.iter().map(|row| (row.draft.row, row.draft.token, row.first_token)).collect();
        assert_eq!(found, [(0, 1, 50), (2, 7, 70)], "the row of two tokens has no block");
        let pass = block_pass(&step, &rows, SHAPE);
        assert_eq!(pass.tokens, [50, 99, 99, 70, 99, 99]);
        assert_eq!(pass.positions, [30, 31, 32, 9, 10, 11]);
        assert_eq!(pass.qo_indptr, [0, 3, 6]);
        assert_eq!(pass.samples.iter().map(|sample| sample.token).collect::<Vec<_>>(), [0, 3, 1, 4]);
        assert_eq!(pass.block_tables, [step.block_tables[0].clone(), step.block_tables[2].clone()]);
    }
}
