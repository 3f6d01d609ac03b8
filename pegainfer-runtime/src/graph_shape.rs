//! Shapes of the passes that run as CUDA graphs.
//!
//! A graph keeps its launches, so every pass that replays it has their shapes. Decode steps run as graphs for every
//! model. If the launches depend only on the numbers of rows, tokens and samples, because kernels read the lengths of
//! rows from device memory, steps that verify drafts and passes that draft run as graphs, too. Their shape has as many
//! tokens as its rows would have if all were as long as the longest one. Missing tokens of shorter rows are added after
//! the last row.

use super::block_shape::BlockShape;
use super::bounds::Bounds;
use super::model::{Model, StepOf};
use super::pass_kind::PassKind;
use pegainfer_core::exec::Device;
use pegainfer_core::kv::NO_SLOT;
use pegainfer_core::schedule::{Graphs, SampleRow, Step};
use std::hash::Hash;

/// Tokens of the largest graph with several tokens per row. Limits the number of graphs and their memory. Larger steps
/// take the GPU longer than their launches take the host.
const MAX_TOKENS: usize = 128;

/// Key of a CUDA graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct GraphKey {
    pub kind: PassKind,
    pub shape: GraphShape,
    /// True if rows have adapters.
    pub adapters: bool,
}

/// Shape of a pass that runs as a CUDA graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct GraphShape {
    /// Rows.
    pub rows: usize,
    /// Input tokens.
    pub tokens: usize,
    /// Sampled tokens.
    pub samples: usize,
}

impl GraphShape {
    /// Shape of a step.
    pub fn of<R>(step: &Step<R>) -> Self {
        Self { rows: step.rows.len(), tokens: step.tokens.len(), samples: step.samples.len() }
    }
}

/// Passes that ran as CUDA graphs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GraphReplays {
    /// Steps with one token per row.
    pub decode: u64,
    /// Steps with several tokens per row, which verify drafts.
    pub verify: u64,
    /// Passes of the layers that draft over the tokens of a step.
    pub first_drafts: u64,
    /// Passes of these layers over their own drafts.
    pub next_drafts: u64,
    /// Passes over blocks.
    pub blocks: u64,
}

impl GraphReplays {
    /// Replays of these graphs.
    pub(super) fn of(graphs: &Graphs<GraphKey>) -> Self {
        let of = |kind: PassKind| graphs.replays_of(|key| key.kind == kind);
        let is_decode = |key: &GraphKey| key.kind == PassKind::Layers && key.shape.tokens == key.shape.rows;
        let decode = graphs.replays_of(is_decode);
        Self {
            decode,
            verify: of(PassKind::Layers) - decode,
            first_drafts: of(PassKind::Drafts { again: false }),
            next_drafts: of(PassKind::Drafts { again: true }),
            blocks: of(PassKind::Blocks),
        }
    }
}

/// True if a step is so large and samples so few of its tokens that it never runs as a graph: its launches may depend
/// on its contexts.
pub fn is_prompt_step<R>(step: &Step<R>) -> bool {
    let (tokens, samples) = (step.tokens.len(), step.samples.len());
    tokens > MAX_TOKENS && 2 * samples < tokens
}

/// Largest graphs of an executor.
#[derive(Debug, Clone, Copy)]
pub(super) struct GraphBounds {
    /// Tokens of a row; `None` if only decode steps with one sampled token per row are graphs.
    row_tokens: Option<usize>,
    /// Tokens, and so samples, if rows have several.
    tokens: usize,
    /// Maximum number of blocks in a pass over blocks, and tokens of a block; 0 for a model that drafts no blocks.
    blocks: (usize, usize),
}

impl GraphBounds {
    /// Bounds of the graphs of `M` within `bounds`: a row has its newest token and the drafts after it. `block`: shape of
    /// the blocks that it drafts.
    pub fn new<M: Model>(bounds: &Bounds, device: Device, block: Option<BlockShape>) -> Self {
        Self {
            row_tokens: M::SHAPED_GRAPHS.then_some(1 + bounds.drafts),
            tokens: MAX_TOKENS.min(bounds.size.tokens).min(bounds.logits_rows(device)),
            blocks: block.map_or((0, 0), |block| (bounds.blocks(block, device), block.tokens)),
        }
    }

    /// Key of the graph of a pass of this kind over `step`, among `graphs`; `None` if it runs launch by launch, as a step
    /// with rows of images does.
    pub fn key<R: Clone + Default>(
        &self,
        graphs: &Graphs<GraphKey>,
        kind: PassKind,
        step: &Step<R>,
    ) -> Option<GraphKey> {
        if !step.images.is_empty() {
            return None;
        }
        let kind = match kind {
            // A row has one token in both.
            PassKind::Drafts { .. } if self.row_tokens.is_none() => PassKind::Drafts { again: false },
            kind => kind,
        };
        let shape = match kind {
            PassKind::Blocks => self.block_shape(graphs, step),
            PassKind::Layers | PassKind::Drafts { .. } => self.shape(graphs, step),
        };
        let adapters = !step.adapters.is_empty();
        shape.map(|shape| GraphKey { kind, shape, adapters })
    }

    /// Shape of a pass over blocks.
    fn block_shape<K: Copy + Eq + Hash, R>(&self, graphs: &Graphs<K>, pass: &Step<R>) -> Option<GraphShape> {
        let ((blocks, block_tokens), rows) = (self.blocks, graphs.rows(pass)?);
        let (tokens, positions) = (rows * block_tokens, pass.samples.len() / pass.rows.len());
        (rows <= blocks && tokens <= MAX_TOKENS).then_some(GraphShape { rows, tokens, samples: rows * positions })
    }

    /// Shape to pad `step` to. If rows may have several tokens, samples are one token per row or every token.
    fn shape<K: Copy + Eq + Hash, R: Clone + Default>(&self, graphs: &Graphs<K>, step: &Step<R>) -> Option<GraphShape> {
        let Some(max_tokens) = self.row_tokens else {
            return graphs.size(step).map(|rows| GraphShape { rows, tokens: rows, samples: rows });
        };
        let (rows, row_tokens) = (graphs.rows(step)?, step.queries().1);
        let tokens = rows * row_tokens;
        let fits = row_tokens == 1 || row_tokens <= max_tokens && tokens <= self.tokens;
        let samples = if step.samples.len() <= rows { rows } else { tokens };
        fits.then_some(GraphShape { rows, tokens, samples })
    }
}

/// `step` padded to the shape of a CUDA graph. An added row has one token, and reads and writes no state. Added tokens
/// come after the last row and belong to none; added samples are never read. In a pass over blocks, the samples of added
/// rows are among those of each position.
pub(super) fn padded_to<M: Model>(step: &StepOf<M>, key: GraphKey) -> StepOf<M> {
    let mut padded = without_state(step, key);
    M::add_state_rows(&mut padded, step.rows.len());
    padded
}

/// [`padded_to`], without the state rows of added rows.
fn without_state<R: Clone + Default>(step: &Step<R>, GraphKey { kind, shape, .. }: GraphKey) -> Step<R> {
    let (rows, added) = (step.rows.len(), shape.rows - step.rows.len());
    let mut padded = step.padded(shape.rows);
    padded.tokens.resize(shape.tokens, 0);
    padded.positions.resize(shape.tokens, 0);
    if !padded.rope_positions.is_empty() {
        padded.rope_positions.resize(shape.tokens, [0; 3]);
    }
    padded.slots.resize(shape.tokens, NO_SLOT);
    if kind != PassKind::Blocks {
        padded.samples.resize(shape.samples, SampleRow::of_padding(0));
        return padded;
    }
    let of_position = |samples: &[SampleRow]| {
        let added = std::iter::repeat_n(SampleRow::of_padding(0), added);
        samples.iter().cloned().chain(added).collect::<Vec<_>>()
    };
    padded.samples = step.samples.chunks(rows).flat_map(of_position).collect();
    padded
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_core::schedule::{NO_STATE, Segment};

    const BLOCK_TOKENS: usize = 128;
    const SHAPED: GraphBounds = GraphBounds { row_tokens: Some(4), tokens: 128, blocks: (0, 0) };

    fn ragged(rows: &[(usize, usize)]) -> Step<Segment> {
        let mut step = Step::ragged(BLOCK_TOKENS, rows);
        step.add_segments(0);
        step
    }

    fn uniform(batch: usize, tokens: usize, context: usize) -> Step<Segment> {
        ragged(&vec![(tokens, context); batch])
    }

    fn padded(step: &Step<Segment>, kind: PassKind, shape: GraphShape) -> Step<Segment> {
        let mut padded = without_state(step, GraphKey { kind, shape, adapters: false });
        padded.add_segments(step.rows.len());
        padded
    }

    fn shape(step: &Step<Segment>) -> Option<(usize, usize, usize)> {
        let shape = SHAPED.shape(&Graphs::<GraphShape>::new(64), step);
        shape.map(|GraphShape { rows, tokens, samples }| (rows, tokens, samples))
    }

    /// Rows that add these numbers of tokens, all sampled.
    fn verify(rows: &[usize]) -> Step<Segment> {
        let mut step = ragged(&rows.iter().map(|tokens| (*tokens, 40)).collect::<Vec<_>>());
        let sample = step.samples[0].clone();
        step.samples = (0..step.tokens.len() as u32).map(|token| SampleRow { token, ..sample.clone() }).collect();
        step
    }

    #[test]
    fn a_shape_has_the_tokens_of_the_longest_row_for_each_row() {
        assert_eq!(shape(&verify(&[4])), Some((1, 4, 4)));
        assert_eq!(shape(&verify(&[1, 1, 1, 1, 1])), Some((6, 6, 6)), "decodes");
        assert_eq!(shape(&verify(&[4, 2, 4, 1, 3])), Some((6, 24, 24)));
        assert_eq!(shape(&ragged(&[(4, 40), (2, 40)])), Some((2, 8, 2)), "the first pass of the layer that drafts");
        let none = Step { samples: Vec::new(), ..verify(&[4, 2]) };
        assert_eq!(shape(&none), Some((2, 8, 2)));
    }

    #[test]
    fn without_shaped_graphs_only_decode_steps_have_one() {
        let (bounds, graphs) = (GraphBounds { row_tokens: None, ..SHAPED }, Graphs::<GraphShape>::new(64));
        let has_one = |step: &Step<Segment>| bounds.shape(&graphs, step).is_some();
        assert!(has_one(&verify(&[1, 1])) && !has_one(&verify(&[2])));
        assert!(!has_one(&Step { samples: Vec::new(), ..verify(&[1, 1]) }));
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
        let small = GraphBounds { tokens: 8, ..SHAPED };
        let fits = |rows: &[usize]| small.shape(&Graphs::<GraphShape>::new(8), &verify(rows)).is_some();
        assert!(fits(&[4, 4]) && !fits(&[4, 4, 4]), "inputs and logits are as large as the largest step");
    }

    #[test]
    fn steps_of_prompts_never_run_as_graphs() {
        assert!(is_prompt_step(&uniform(1, MAX_TOKENS + 1, 300)));
        assert!(!is_prompt_step(&uniform(1, MAX_TOKENS, 300)));
        let bounds = GraphBounds { row_tokens: Some(8), ..SHAPED };
        let unsampled = |step: Step<Segment>| Step { samples: Vec::new(), ..step };
        for (rows, tokens) in [(200, 1), (256, 1), (16, 8), (64, 2)] {
            let (sampled, once) = (verify(&vec![tokens; rows]), uniform(rows, tokens, 40));
            for step in [sampled, unsampled(once.clone()), once] {
                let shape = bounds.shape(&Graphs::<GraphShape>::new(256), &step).unwrap();
                assert!(!is_prompt_step(&padded(&step, PassKind::Layers, shape)), "{shape:?}");
            }
        }
    }

    #[test]
    fn what_is_added_has_no_state_and_lies_behind_the_rows() {
        let step = verify(&[4, 2, 4, 1, 3]);
        let padded = padded(&step, PassKind::Layers, GraphShape { rows: 6, tokens: 24, samples: 24 });
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
        let mut first = uniform(3, 4, 40);
        first.samples.truncate(1);
        let padded = padded(&first, PassKind::Layers, GraphShape { rows: 3, tokens: 12, samples: 3 });
        assert_eq!(padded.samples.iter().map(|sample| sample.token).collect::<Vec<_>>(), [3, 0, 0]);
    }

    #[test]
    fn blocks_are_padded_position_by_position() {
        let mut pass = uniform(5, 5, 45);
        pass.samples = (0..2).flat_map(|i| (0..5).map(move |b| SampleRow::of_padding(5 * b + i))).collect();
        let bounds = |blocks| GraphBounds { blocks: (blocks, 5), ..SHAPED };
        let graphs = Graphs::<GraphShape>::new(64);
        let shape = bounds(6).block_shape(&graphs, &pass).unwrap();
        assert_eq!((shape.rows, shape.tokens, shape.samples), (6, 30, 12));
        assert_eq!(bounds(5).block_shape(&graphs, &pass), None, "more blocks than fit");
        assert_eq!(bounds(64).block_shape(&graphs, &uniform(28, 5, 45)), None, "140 tokens");
        let padded = padded(&pass, PassKind::Blocks, shape);
        let tokens: Vec<u32> = padded.samples.iter().map(|sample| sample.token).collect();
        assert_eq!(tokens, [0, 5, 10, 15, 20, 0, 1, 6, 11, 16, 21, 0]);
        assert_eq!((padded.tokens.len(), padded.state.len(), padded.state[5].to), (30, 6, NO_STATE));
        assert_eq!(padded.qo_indptr, [0, 5, 10, 15, 20, 25, 26]);
    }
}
