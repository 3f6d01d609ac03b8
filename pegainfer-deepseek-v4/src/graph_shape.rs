//! Shapes of the steps that run as CUDA graphs.
//!
//! The launches of a pass depend only on the numbers of rows, tokens and samples, because kernels read the lengths of
//! rows from device memory. Decode steps, steps that verify drafts, and passes of the layer that drafts can therefore
//! run as graphs. A shape has as many tokens as its rows would have if all were as long as the longest one. Missing
//! tokens of shorter rows are added after the last row.

use crate::bounds::StepBounds;
use crate::plan::{NO_STATE, SampleRow, Segment, Step};
use pegainfer_core::kv::NO_SLOT;
use pegainfer_core::schedule::Graphs;
use std::hash::Hash;

/// Tokens of the largest graph with several tokens per row. Limits the number of graphs and their memory. Larger steps
/// take the GPU longer than their launches take the host.
const MAX_TOKENS: usize = 128;

/// True if a step is so large and samples so few of its tokens that it never runs as a graph: its launches may depend
/// on its contexts.
pub(crate) fn is_prompt_step(step: &Step) -> bool {
    let (tokens, samples) = (step.tokens.len(), step.samples.len());
    tokens > MAX_TOKENS && 2 * samples < tokens
}

/// GraphShape of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GraphShape {
    /// Rows.
    pub rows: usize,
    /// Input tokens.
    pub tokens: usize,
    /// Sampled tokens.
    pub samples: usize,
}

/// Largest graphs of an executor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GraphBounds {
    /// Tokens of a row.
    row_tokens: usize,
    /// Tokens, and so samples, if rows have several.
    tokens: usize,
    /// Blocks of a pass of DSpark's stages, and tokens of a block; 0 without the stages.
    blocks: (usize, usize),
}

impl GraphBounds {
    /// Bounds of steps within `bounds`: a row has its newest token and the drafts after it. `blocks`: maximum number of
    /// blocks in a pass of DSpark's stages, and tokens of a block; 0 without the stages.
    pub fn new(bounds: StepBounds, blocks: (usize, usize)) -> Self {
        Self { row_tokens: 1 + bounds.drafts, tokens: MAX_TOKENS.min(bounds.tokens).min(bounds.samples), blocks }
    }

    /// Variant of [`shape`](Self::shape) for a pass over blocks.
    pub fn block_shape<K: Copy + Eq + Hash>(&self, graphs: &Graphs<K>, pass: &Step) -> Option<GraphShape> {
        let ((blocks, block_tokens), rows) = (self.blocks, graphs.rows(pass)?);
        let (tokens, positions) = (rows * block_tokens, pass.samples.len() / pass.rows.len());
        (rows <= blocks && tokens <= MAX_TOKENS).then_some(GraphShape { rows, tokens, samples: rows * positions })
    }

    /// Shape to pad `step` to, for one of `graphs`, which pad rows; `None` if the step runs launch by launch. Samples
    /// are one token per row or every token.
    pub fn shape<K: Copy + Eq + Hash>(&self, graphs: &Graphs<K>, step: &Step) -> Option<GraphShape> {
        let (rows, row_tokens) = (graphs.rows(step)?, step.queries().1);
        let tokens = rows * row_tokens;
        let fits = row_tokens == 1 || row_tokens <= self.row_tokens && tokens <= self.tokens;
        let samples = if step.samples.len() <= rows { rows } else { tokens };
        fits.then_some(GraphShape { rows, tokens, samples })
    }
}

/// `step` padded to the shape of a CUDA graph. An added row has one token and no slot: it reads and writes no state.
/// Added tokens come after the last row and belong to none; added samples are never read.
pub fn padded(step: &Step, shape: GraphShape) -> Step {
    let mut padded = step.padded(shape.rows);
    for row in step.rows.len()..shape.rows {
        let (first, end) = (padded.qo_indptr[row], padded.qo_indptr[row + 1]);
        padded.state.push(Segment { first, end, from: NO_STATE, to: NO_STATE });
    }
    padded.tokens.resize(shape.tokens, 0);
    padded.positions.resize(shape.tokens, 0);
    padded.slots.resize(shape.tokens, NO_SLOT);
    padded.samples.resize(shape.samples, SampleRow::of_padding(0));
    padded
}

/// A pass over blocks padded to the shape of a CUDA graph: [`padded`], with the samples of added rows among those of
/// each position.
pub fn padded_blocks(pass: &Step, shape: GraphShape) -> Step {
    let (rows, added) = (pass.rows.len(), shape.rows - pass.rows.len());
    let mut padded = padded(&Step { samples: Vec::new(), ..pass.clone() }, shape);
    let of_position = |samples: &[SampleRow]| {
        let added = std::iter::repeat_n(SampleRow::of_padding(0), added);
        samples.iter().cloned().chain(added).collect::<Vec<_>>()
    };
    padded.samples = pass.samples.chunks(rows).flat_map(of_position).collect();
    padded
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounds::Sharing;
    use crate::plan;

    const BOUNDS: StepBounds = StepBounds {
        tokens: 512,
        rows: 64,
        samples: 256,
        drafts: 3,
        context: 1024,
        slots: 64,
        pages: 64,
        sharing: Sharing::ALWAYS,
        graphs: true,
    };

    fn shape(step: &Step) -> Option<(usize, usize, usize)> {
        let shape = GraphBounds::new(BOUNDS, (0, 0)).shape(&Graphs::<GraphShape>::new(BOUNDS.rows), step);
        shape.map(|GraphShape { rows, tokens, samples }| (rows, tokens, samples))
    }

    /// Rows that add these numbers of tokens, all sampled.
    fn verify(rows: &[usize]) -> Step {
        let mut step = plan::ragged(&rows.iter().map(|tokens| (*tokens, 40)).collect::<Vec<_>>());
        let sample = step.samples[0].clone();
        step.samples = (0..step.tokens.len() as u32).map(|token| SampleRow { token, ..sample.clone() }).collect();
        step
    }

    #[test]
    fn a_shape_has_the_tokens_of_the_longest_row_for_each_row() {
        assert_eq!(shape(&verify(&[4])), Some((1, 4, 4)));
        assert_eq!(shape(&verify(&[1, 1, 1, 1, 1])), Some((6, 6, 6)), "decodes");
        assert_eq!(shape(&verify(&[4, 2, 4, 1, 3])), Some((6, 24, 24)));
        assert_eq!(
            shape(&plan::ragged(&[(4, 40), (2, 40)])),
            Some((2, 8, 2)),
            "the first pass of the layer that drafts"
        );
        let none = Step { samples: Vec::new(), ..verify(&[4, 2]) };
        assert_eq!(shape(&none), Some((2, 8, 2)));
    }

    #[test]
    fn long_rows_and_large_steps_have_none() {
        assert_eq!(shape(&verify(&[5])), None, "more tokens than a row verifies");
        assert_eq!(shape(&verify(&[4; 32])), Some((32, 128, 128)));
        assert_eq!(shape(&verify(&[4; 33])), None);
        assert_eq!(shape(&verify(&[1; 64])), Some((64, 64, 64)));
        assert_eq!(shape(&verify(&[1; 65])), None);
        let mut reported = verify(&[4]);
        reported.samples[2].logprobs = Some(1);
        assert_eq!(shape(&reported), shape(&verify(&[4])), "no graph samples");
        let small = GraphBounds::new(StepBounds { tokens: 16, samples: 8, ..BOUNDS }, (0, 0));
        let fits = |rows: &[usize]| small.shape(&Graphs::<GraphShape>::new(8), &verify(rows)).is_some();
        assert!(fits(&[4, 4]) && !fits(&[4, 4, 4]), "inputs and logits are as large as the largest step");
    }

    #[test]
    fn steps_of_prompts_never_run_as_graphs() {
        assert!(is_prompt_step(&plan::uniform(1, MAX_TOKENS + 1, 300)));
        assert!(!is_prompt_step(&plan::uniform(1, MAX_TOKENS, 300)));
        let bounds = GraphBounds::new(StepBounds { tokens: 4096, samples: 512, drafts: 7, ..BOUNDS }, (0, 0));
        let unsampled = |step: Step| Step { samples: Vec::new(), ..step };
        for (rows, tokens) in [(200, 1), (256, 1), (16, 8), (64, 2)] {
            let (sampled, once) = (verify(&vec![tokens; rows]), plan::uniform(rows, tokens, 40));
            for step in [sampled, unsampled(once.clone()), once] {
                let shape = bounds.shape(&Graphs::<GraphShape>::new(256), &step).unwrap();
                assert!(!is_prompt_step(&padded(&step, shape)), "{shape:?}");
            }
        }
    }

    #[test]
    fn what_is_added_has_no_state_and_lies_behind_the_rows() {
        let step = verify(&[4, 2, 4, 1, 3]);
        let padded = padded(&step, GraphShape { rows: 6, tokens: 24, samples: 24 });
        assert_eq!(padded.qo_indptr, [0, 4, 6, 10, 11, 14, 15]);
        let lengths = [padded.tokens.len(), padded.positions.len(), padded.slots.len(), padded.samples.len()];
        assert_eq!(lengths, [24; 4]);
        assert_eq!((&padded.tokens[..14], &padded.samples[..14]), (&step.tokens[..], &step.samples[..]));
        assert!(padded.slots[14..].iter().all(|slot| *slot == NO_SLOT));
        assert!(padded.samples[14..].iter().all(|sample| (sample.token as usize) < 24));
        assert_eq!((padded.rows.len(), padded.kv_lens.len(), padded.block_tables.len()), (6, 6, 6));
        assert!(padded.block_tables[5].is_empty() && padded.block_tables[..5] == step.block_tables);
        assert_eq!(padded.state[..5], step.state[..]);
        assert_eq!((padded.state[5].from, padded.state[5].to), (NO_STATE, NO_STATE));
    }

    #[test]
    fn rows_that_are_not_sampled_get_samples_that_nobody_reads() {
        let mut first = plan::uniform(3, 4, 40);
        first.samples.truncate(1);
        let padded = padded(&first, GraphShape { rows: 3, tokens: 12, samples: 3 });
        assert_eq!(padded.samples.iter().map(|sample| sample.token).collect::<Vec<_>>(), [3, 0, 0]);
    }

    #[test]
    fn blocks_are_padded_position_by_position() {
        let mut pass = plan::uniform(5, 5, 45);
        pass.samples = (0..2).flat_map(|i| (0..5).map(move |b| SampleRow::of_padding(5 * b + i))).collect();
        let bounds = |blocks| GraphBounds::new(BOUNDS, (blocks, 5));
        let graphs = Graphs::<GraphShape>::new(64);
        let shape = bounds(6).block_shape(&graphs, &pass).unwrap();
        assert_eq!((shape.rows, shape.tokens, shape.samples), (6, 30, 12));
        assert_eq!(bounds(5).block_shape(&graphs, &pass), None, "more blocks than fit");
        assert_eq!(bounds(64).block_shape(&graphs, &plan::uniform(28, 5, 45)), None, "140 tokens");
        let padded = padded_blocks(&pass, shape);
        let tokens: Vec<u32> = padded.samples.iter().map(|sample| sample.token).collect();
        assert_eq!(tokens, [0, 5, 10, 15, 20, 0, 1, 6, 11, 16, 21, 0]);
        assert_eq!((padded.tokens.len(), padded.state.len(), padded.state[5].to), (30, 6, NO_STATE));
        assert_eq!(padded.qo_indptr, [0, 5, 10, 15, 20, 25, 26]);
    }
}
