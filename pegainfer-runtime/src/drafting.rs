//! Drafting by the model's own layers (multi-token prediction): the passes after a step.
//!
//! Once the tokens of a step are known, the layers that draft run over all of its tokens. They need the token *after*
//! each one, and their keys and values must cover the whole text. The newest accepted token gives the first draft. Each
//! further pass has one row per sequence, whose input is the previous draft; it stays on the device.

use super::readbacks::Readbacks;
use super::sampler::Sampler;
use pegainfer_core::exec::Exec;
use pegainfer_core::images::StepImage;
use pegainfer_core::kv::NO_SLOT;
use pegainfer_core::sampling::SamplingParams;
use pegainfer_core::schedule::{PLACEHOLDER, SampleRow, Step, StepAdapters, StepRow};
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_kernels::ops::Matrix;

/// A row of a step after which the model drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftRow {
    /// Index in the step.
    pub row: usize,
    /// Index of its newest accepted token, after which a token was sampled.
    pub token: usize,
    /// Drafts that are wanted.
    pub count: usize,
}

/// The first pass: over the tokens of `step`, whose samples drew `drawn`, each replaced by the token after it. Samples
/// after the newest token of each row that drafts. State of the layers for tokens after refused drafts is wrong; the
/// next step overwrites it.
pub fn first_pass<R: Clone + Default>(step: &Step<R>, drawn: &[u32]) -> (Step<R>, Vec<DraftRow>) {
    // The model drafts without the adapters; the next step verifies with them.
    let (tokens, adapters) = (Vec::with_capacity(step.tokens.len()), StepAdapters::default());
    let mut first = Step { tokens, images: images_after(step), samples: Vec::new(), adapters, ..step.clone() };
    let mut rows = Vec::new();
    let mut sampled = step.samples.iter().zip(drawn).peekable();
    for (b, row) in step.rows.iter().enumerate() {
        let (begin, end) = (step.qo_indptr[b] as usize, step.qo_indptr[b + 1] as usize);
        let newest = end - 1 - row.drafts;
        let mut following = Vec::new();
        while let Some((sample, token)) = sampled.next_if(|(sample, _)| (sample.token as usize) < end) {
            // Earlier samples are prompt logprobs.
            if sample.token as usize >= newest {
                following.push(*token);
            }
        }
        first.tokens.extend(&step.tokens[begin + 1..=newest]);
        match row.next {
            Some(next) => first.tokens.push(next),
            None => first.tokens.extend(&following),
        }
        if row.model_drafts > 0 {
            let drafts = &step.tokens[newest + 1..end];
            let token = newest + drafts.iter().zip(&following).take_while(|(draft, token)| draft == token).count();
            first.samples.push(greedy(row, token));
            rows.push(DraftRow { row: b, token, count: row.model_drafts });
        }
    }
    (first, rows)
}

/// The images of the tokens after those of a step, as far as they are in it: a chunk that ends before a token of an
/// image gets the embedding of the image token for it.
fn images_after<R>(step: &Step<R>) -> Vec<StepImage> {
    let before = |StepImage { first, rows, image }: &StepImage| {
        let begins_row = step.qo_indptr.contains(&(*first as u32));
        let (first, rows) = if begins_row { (*first, rows.start + 1..rows.end) } else { (first - 1, rows.clone()) };
        (!rows.is_empty()).then(|| StepImage { first, rows, image: image.clone() })
    };
    step.images.iter().filter_map(before).collect()
}

/// Pass `pass`, from 1 on, after the [`first_pass`] over `step`: one token for each of `rows`, drawn by the previous
/// pass. A row that needs no more drafts attends to nothing and writes nothing. `block_tokens`: tokens of a KV block.
/// `state` stays empty.
pub fn next_pass<R: Clone + Default>(step: &Step<R>, rows: &[DraftRow], pass: usize, block_tokens: usize) -> Step<R> {
    let mut next = Step { qo_indptr: vec![0], ..Step::default() };
    for (i, DraftRow { row, token, count }) in rows.iter().enumerate() {
        let blocks = &step.block_tables[*row];
        let position = step.positions[*token] as usize + pass;
        let (position, slot, context) = match pass < *count {
            true => {
                let block = blocks.at(position / block_tokens) as usize;
                (position, block * block_tokens + position % block_tokens, position + 1)
            }
            false => (0, NO_SLOT as usize, 0),
        };
        next.tokens.push(PLACEHOLDER | i as u32);
        next.positions.push(position as u32);
        // Text follows, which has one position on all axes.
        let rotary = step.rope_positions.get(*token).and_then(|position| position.iter().max());
        next.rope_positions.extend(rotary.map(|newest| [newest + pass as u32; 3]));
        next.slots.push(slot as u32);
        next.qo_indptr.push(i as u32 + 1);
        next.kv_lens.push(context as u32);
        next.block_tables.push(blocks.clone());
        next.rows.push(StepRow { drafts: 0, model_drafts: 0, ..step.rows[*row] });
        next.samples.push(greedy(&step.rows[*row], i));
    }
    next
}

/// Samples the most likely token after token `token`.
fn greedy(row: &StepRow, token: usize) -> SampleRow {
    let params = SamplingParams::greedy();
    let (id, token) = (row.id, token as u32);
    SampleRow { id, token, position: 0, logits_update: None, deferred: false, params, logprobs: None, vector: false }
}

/// The part of the vocabulary that drafts are taken from.
#[derive(Debug)]
pub(super) struct DraftVocabulary {
    /// The first rows of the output matrix, in its memory.
    pub head: Matrix,
    /// Samples from hidden states to these ids.
    pub sampler: Sampler,
}

impl DraftVocabulary {
    /// The first `size` ids of `head`, for passes of up to `samples` samples.
    pub fn new(exec: &mut Exec, head: &Tensor, size: usize, samples: usize) -> std::io::Result<Self> {
        Ok(Self { head: Matrix::Bf16(head.row_range(0..size)), sampler: Sampler::new(exec, size, samples)? })
    }
}

/// Waits for the drafts of all `passes` passes after a step of `step_rows` rows; returns those of each row.
pub fn finish(
    readbacks: &mut Readbacks,
    step_rows: usize,
    rows: &[DraftRow],
    passes: usize,
) -> Result<Vec<Vec<u32>>, OpError> {
    let mut drafts = vec![Vec::new(); step_rows];
    for pass in 0..passes {
        let tokens = readbacks.finish()?.tokens;
        let wanted = rows.iter().zip(tokens).filter(|(row, _)| pass < row.count);
        wanted.for_each(|(row, token)| drafts[row.row].push(token));
    }
    Ok(drafts)
}

/// Passes that give each of `rows` its drafts.
pub fn passes(rows: &[DraftRow]) -> usize {
    rows.iter().map(|row| row.count).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_core::images::Image;
    use pegainfer_kernels::ops::BLOCK_SIZE;
    use std::sync::Arc;

    /// A chunk within a prompt, a row of three drafts of which one is accepted, and the end of a prompt with a prompt
    /// logprob.
    fn step() -> (Step, Vec<u32>) {
        let mut step = Step::<()>::ragged(BLOCK_SIZE, &[(3, 10), (4, 32), (2, 2)]);
        step.tokens = vec![10, 11, 12, 20, 21, 22, 23, 30, 31];
        step.rows[0].next = Some(13);
        (step.rows[1].drafts, step.rows[1].model_drafts) = (3, 3);
        step.rows[2].model_drafts = 1;
        let sample = |token: usize| SampleRow { token: token as u32, ..step.samples[0].clone() };
        let samples = [3, 4, 5, 6, 7, 8].map(sample).to_vec();
        (Step { samples, ..step }, vec![21, 40, 41, 42, 31, 50])
    }

    #[test]
    fn the_first_pass_has_the_tokens_behind_and_samples_behind_those_that_count() {
        let (step, drawn) = step();
        let (first, rows) = first_pass(&step, &drawn);
        assert_eq!(first.tokens, [11, 12, 13, 21, 40, 41, 42, 31, 50]);
        assert_eq!(rows, [DraftRow { row: 1, token: 4, count: 3 }, DraftRow { row: 2, token: 8, count: 1 }]);
        assert_eq!(first.samples.iter().map(|sample| sample.token).collect::<Vec<_>>(), [4, 8]);
        assert_eq!((&first.positions, &first.slots, &first.kv_lens), (&step.positions, &step.slots, &step.kv_lens));
    }

    #[test]
    fn rows_of_images_move_to_the_tokens_before_them() {
        let image = Arc::new(Image::new((2, 8), vec![0; 16 * 768]).unwrap());
        let part = |first, rows| StepImage { first, rows, image: image.clone() };
        let (step, drawn) = step();
        // Tokens 1 and 2, token 3 at the start of a row, and two of the third row.
        let images = vec![part(1, 0..2), part(3, 3..4), part(7, 0..2)];
        let rope_positions = (0..9).map(|i| [i, i + 10, i + 5]).collect();
        let (first, rows) = first_pass(&Step { images, rope_positions, ..step.clone() }, &drawn);
        assert_eq!(first.images, [part(0, 0..2), part(7, 1..2)]);
        let next = next_pass(&first, &rows, 2, BLOCK_SIZE);
        assert_eq!(next.rope_positions, [[16; 3], [20; 3]]);
        assert!(next_pass(&step, &rows, 2, BLOCK_SIZE).rope_positions.is_empty());
    }

    #[test]
    fn further_passes_go_on_behind_the_newest_token_until_a_row_has_its_drafts() {
        let (step, drawn) = step();
        let rows = first_pass(&step, &drawn).1;
        assert_eq!(passes(&rows), 3);
        let next = next_pass(&step, &rows, 2, BLOCK_SIZE);
        assert_eq!(next.tokens, [PLACEHOLDER, PLACEHOLDER | 1]);
        // Token 4 of the step is at position 29; the row's blocks are 2 and 3.
        assert_eq!((&next.positions[..], &next.kv_lens[..]), (&[31, 0][..], &[32, 0][..]));
        assert_eq!(next.slots, [(3 * BLOCK_SIZE + 31 % BLOCK_SIZE) as u32, NO_SLOT]);
        assert!(next.samples_every_token());
    }
}
