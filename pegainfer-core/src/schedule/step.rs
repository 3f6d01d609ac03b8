//! The work of one step, as the scheduler hands it to the executor.

use super::encoding::EncodePart;
use super::step_adapters::StepAdapters;
use crate::engine::{RequestId, TokenLogprobs};
use crate::images::StepImage;
use crate::kv::{BlockIds, NO_SLOT};
use crate::ledger::ExpertCounts;
use crate::logits_processors::{CountUpdate, LogitEdit, LogitsUpdate};
use crate::sampling::SamplingParams;
use std::time::Duration;

/// Placeholder token id: `PLACEHOLDER | j` stands for the id of sample `j` of the previous step. The device resolves
/// it. No vocabulary has ids with this bit.
pub const PLACEHOLDER: u32 = 1 << 31;

/// A ragged batch: every row holds the next tokens of one sequence, a prefill chunk or a decode token.
///
/// `T` = tokens of the step, `B` = rows. Holds only what the rows need; the executor knows no requests. `R` is defined
/// by the model's [`SequenceState`](super::SequenceState).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Step<R = ()> {
    /// Input ids, `[T]`. `PLACEHOLDER | j` stands for the token of sample `j` of the previous step, which may still run
    /// and whose tokens are only on the device.
    pub tokens: Vec<u32>,
    /// Absolute position of each input token, `[T]`.
    pub positions: Vec<u32>,
    /// Time, row and column of each token for rotary embeddings, `[T]`; see
    /// [`rope_position`](crate::images::rope_position). Empty without images: then all three are the token's position.
    pub rope_positions: Vec<[u32; 3]>,
    /// Rows of images that replace embeddings, in the order of the tokens.
    pub images: Vec<StepImage>,
    /// Part of an image that a later step needs, to be encoded before the tokens of this one.
    pub encode: Option<EncodePart>,
    /// Destination of each input token's K and V, `block * block_tokens + row` or [`NO_SLOT`], `[T]`.
    pub slots: Vec<u32>,
    /// Row `b` owns tokens `qo_indptr[b]..qo_indptr[b + 1]`, `[B + 1]`.
    pub qo_indptr: Vec<u32>,
    /// Context of each row in tokens, including its own, `[B]`.
    pub kv_lens: Vec<u32>,
    /// Block ids of each row, `[B]`. The rows of one sequence in several steps share a list, so that an executor finds
    /// new blocks without comparing. Rows of padding have no blocks.
    pub block_tables: Vec<BlockIds>,
    /// The rows, in order, `[B]`.
    pub rows: Vec<StepRow>,
    /// Tokens of the step whose logits are needed, and how to sample them.
    pub samples: Vec<SampleRow>,
    /// Adapters of the rows, if any has one.
    pub adapters: StepAdapters,
    /// Tokens to count before sampling, for sequences with penalties.
    pub counts: Vec<CountUpdate>,
    /// State that the model needs other than the KV cache, in the order of the rows.
    pub state: Vec<R>,
}

/// One sequence's chunk in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepRow {
    /// The request.
    pub id: RequestId,
    /// Index of its sequence in the scheduler.
    pub sequence: usize,
    /// Tokens whose KV is in the cache after this step, drafts excluded.
    pub computed: usize,
    /// Draft tokens at the end of the row: its last samples verify them, see [`speculation`](super::speculation).
    pub drafts: usize,
    /// The token after the row, if it is known because the row ends within the text; such a row verifies no drafts.
    pub next: Option<u32>,
    /// Number of drafts that the model makes after this step for the next one. The block table has capacity for them. 0
    /// for a row with a `next`.
    pub model_drafts: usize,
}

/// One token to sample.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleRow {
    /// The request.
    pub id: RequestId,
    /// Index in `tokens` of the token whose logits are sampled.
    pub token: u32,
    /// Position of the token to be sampled; with the seed it names the random number.
    pub position: u64,
    /// Update by the request's logits processors; usually none.
    pub logits_update: Option<LogitsUpdate>,
    /// True while `logits_update` is unknown, because it depends on a token of a step in flight or on a mask that is
    /// being computed. The forward pass does not need it.
    pub deferred: bool,
    /// Sampling parameters.
    pub params: SamplingParams,
    /// Log-probabilities to report, see `GenerateRequest::logprobs`.
    pub logprobs: Option<usize>,
    /// True if the vector that the logits are computed from is to be reported; see `GenerateRequest::vector`.
    pub vector: bool,
}

impl SampleRow {
    /// A sample whose token is `forced`, for the log-probabilities of a known token: `forced` is at `position` of the
    /// request's prompt, and index `token` of the step's tokens is the one before it.
    pub fn of_prompt(id: RequestId, token: u32, position: usize, forced: u32, logprobs: Option<usize>) -> Self {
        // Larger than any logit; log-probabilities are computed from the raw logits.
        let edit = LogitEdit { token: forced, scale: 1.0, add: f32::MAX };
        let logits_update = Some(LogitsUpdate { edits: vec![edit], ..LogitsUpdate::default() });
        let (position, params) = (position as u64, SamplingParams::greedy());
        Self { id, token, position, logits_update, deferred: false, params, logprobs, vector: false }
    }

    /// A sample of token `token` of the step that is never read, for a graph of fixed shape.
    pub fn of_padding(token: u32) -> Self {
        let (id, params) = (RequestId(u64::MAX), SamplingParams::greedy());
        Self { id, token, position: 0, logits_update: None, deferred: false, params, logprobs: None, vector: false }
    }
}

/// Result of a step: one entry per `Step::samples`, in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// The sampled ids.
    pub tokens: Vec<u32>,
    /// Log-probabilities of each row that requested them; empty if none did.
    pub logprobs: Vec<Option<TokenLogprobs>>,
    /// Vectors of the rows that want one; empty if none does.
    pub vectors: Vec<Option<Box<[f32]>>>,
    /// Drafts that the model made after the accepted tokens of each row, [`StepRow::model_drafts`] of them; empty if it
    /// does not draft.
    pub drafts: Vec<Vec<u32>>,
    /// Time of the draft passes, part of the step's time.
    pub drafting_time: Duration,
    /// Tokens of each expert in one layer, if they were counted.
    pub experts: Option<ExpertCounts>,
}

impl<R> Step<R> {
    /// Largest number of blocks of a row.
    pub fn max_blocks(&self) -> usize {
        self.block_tables.iter().map(BlockIds::len).max().unwrap_or(0)
    }
}

impl<R: Clone + Default> Step<R> {
    /// A step over KV blocks of `block_tokens` tokens, of `batch` equal rows that each add `tokens` tokens to `context
    /// - tokens` cached ones, see [`ragged`](Self::ragged).
    pub fn uniform(block_tokens: usize, batch: usize, tokens: usize, context: usize) -> Self {
        Self::ragged(block_tokens, &vec![(tokens, context); batch])
    }

    /// A step over KV blocks of `block_tokens` tokens, for plans and benchmarks without a scheduler. Each of `rows` is
    /// a row's number of new tokens and its context, new tokens included. Each row samples once. Blocks are numbered
    /// consecutively; `state` is empty.
    pub fn ragged(block_tokens: usize, rows: &[(usize, usize)]) -> Self {
        let max_blocks = rows.iter().map(|(_, context)| context.div_ceil(block_tokens)).max().unwrap_or(0);
        let mut step = Self { qo_indptr: vec![0], ..Self::default() };
        for (b, &(tokens, context)) in rows.iter().enumerate() {
            assert!(0 < tokens && tokens <= context);
            let (id, first) = (RequestId(b as u64), (b * max_blocks * block_tokens) as u32);
            step.positions.extend((context - tokens..context).map(|p| p as u32));
            step.slots.extend((context - tokens..context).map(|p| first + p as u32));
            // Ids that are in any vocabulary, and not all the same.
            step.tokens.extend((0..tokens).map(|t| ((b + t) % 1000) as u32));
            step.qo_indptr.push(step.tokens.len() as u32);
            step.kv_lens.push(context as u32);
            step.block_tables.push((0..max_blocks).map(|i| (b * max_blocks + i) as u32).collect());
            step.rows.push(StepRow { id, sequence: b, computed: context, drafts: 0, next: None, model_drafts: 0 });
            step.samples.push(SampleRow {
                id,
                token: step.tokens.len() as u32 - 1,
                position: context as u64,
                logits_update: None,
                deferred: false,
                params: SamplingParams::greedy(),
                logprobs: None,
                vector: false,
            });
        }
        step
    }

    /// Clears it, but keeps allocated memory.
    pub fn clear(&mut self) {
        let Self { tokens, positions, slots, qo_indptr, kv_lens, block_tables, rows, samples, .. } = self;
        for ids in [tokens, positions, slots, qo_indptr, kv_lens] {
            ids.clear();
        }
        self.rope_positions.clear();
        self.images.clear();
        self.encode = None;
        block_tables.clear();
        rows.clear();
        samples.clear();
        self.adapters.clear();
        self.counts.clear();
        self.state.clear();
    }

    /// This step with its blocks shifted to start at number `first`.
    pub fn over_blocks(mut self, block_tokens: usize, first: usize) -> Self {
        self.slots.iter_mut().for_each(|slot| *slot += (first * block_tokens) as u32);
        for blocks in &mut self.block_tables {
            *blocks = blocks.iter().map(|block| block + first as u32).collect();
        }
        self
    }

    /// This step padded to `rows` rows, for a graph of fixed shape. An added row has one token, attends to nothing,
    /// writes no KV, adds no `state`, and its sample is never read.
    pub fn padded(&self, rows: usize) -> Self {
        let mut step = self.clone();
        for row in self.rows.len()..rows {
            step.samples.push(SampleRow::of_padding(step.tokens.len() as u32));
            step.tokens.push(0);
            step.positions.push(0);
            step.rope_positions.extend((!self.rope_positions.is_empty()).then_some([0; 3]));
            step.slots.push(NO_SLOT);
            step.qo_indptr.push(step.tokens.len() as u32);
            step.kv_lens.push(0);
            let id = RequestId(u64::MAX);
            step.rows.push(StepRow { id, sequence: row, computed: 0, drafts: 0, next: None, model_drafts: 0 });
        }
        step.block_tables.resize(rows, BlockIds::default());
        step.adapters.pad(rows);
        step
    }

    /// True while the logits update of any sample is unknown.
    pub fn is_deferred(&self) -> bool {
        self.samples.iter().any(|sample| sample.deferred)
    }

    /// True if every token is sampled, in order: then the logits rows need no gather.
    pub fn samples_every_token(&self) -> bool {
        let in_order = self.samples.iter().zip(0..).all(|(sample, token)| sample.token == token);
        in_order && self.samples.len() == self.tokens.len()
    }

    /// Indptr of the sampled tokens alone, `[B + 1]`; see `qo_indptr`. `None` unless each of them is the last one of
    /// its row.
    pub fn sampled_indptr(&self) -> Option<Vec<u32>> {
        let mut samples = self.samples.iter().peekable();
        let mut indptr = vec![0];
        for &end in self.qo_indptr.iter().skip(1) {
            let sampled = samples.next_if(|sample| sample.token + 1 == end).is_some();
            indptr.push(indptr[indptr.len() - 1] + u32::from(sampled));
        }
        samples.next().is_none().then_some(indptr)
    }

    /// Smallest and largest number of tokens of a row.
    pub fn queries(&self) -> (usize, usize) {
        let lengths = || self.qo_indptr.windows(2).map(|pair| (pair[1] - pair[0]) as usize);
        (lengths().min().unwrap_or(0), lengths().max().unwrap_or(0))
    }

    /// True if there is nothing to run.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_that_end_their_rows_are_a_ragged_batch_of_their_own() {
        let indptr = |tokens: &[usize]| {
            let mut step = Step::<()>::uniform(16, 4, 3, 3);
            let sample = step.samples[0].clone();
            step.samples = tokens.iter().map(|&token| SampleRow { token: token as u32, ..sample.clone() }).collect();
            step.sampled_indptr()
        };
        assert_eq!(indptr(&[2, 5, 8, 11]), Some(vec![0, 1, 2, 3, 4]));
        assert_eq!(indptr(&[5, 11]), Some(vec![0, 0, 1, 1, 2]), "two rows are cut short");
        assert_eq!(indptr(&[]), Some(vec![0; 5]));
        assert_eq!(indptr(&[2, 4, 5]), None, "a prompt logprob");
        assert_eq!(indptr(&[5, 2]), None, "out of order");
        assert_eq!(indptr(&[5, 5]), None, "twice");
    }
}
