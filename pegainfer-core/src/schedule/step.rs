//! One step's work, as the scheduler hands it to the executor.

use crate::engine::{RequestId, TokenLogprobs};
use crate::kv::{BlockIds, NO_SLOT};
use crate::logits_processors::{CountUpdate, LogitEdit, LogitsUpdate};
use crate::sampling::SamplingParams;
use std::time::Duration;

/// Placeholder token id: `PLACEHOLDER | j` stands for the id that sample `j` of the step before draws, and the device
/// resolves it. No vocabulary has ids with this bit.
pub const PLACEHOLDER: u32 = 1 << 31;

/// A ragged batch: every row is one sequence's next tokens, prefill chunks and decode tokens alike.
///
/// `T` = tokens of the step, `B` = rows. Only what the rows need is here: the executor knows no request. `R` is what the
/// model's [`SequenceState`](super::SequenceState) adds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Step<R = ()> {
    /// Input ids, `[T]`. `PLACEHOLDER | j` stands for the token that sample `j` of the step before draws: that step
    /// may still run, and its tokens are on the device only.
    pub tokens: Vec<u32>,
    /// Absolute position of each input token, `[T]`.
    pub positions: Vec<u32>,
    /// Where each input token's K and V go: `block * block_tokens + row`, or [`NO_SLOT`], `[T]`.
    pub slots: Vec<u32>,
    /// Row `b` owns tokens `qo_indptr[b]..qo_indptr[b + 1]`, `[B + 1]`.
    pub qo_indptr: Vec<u32>,
    /// Tokens each row attends to, its own included, `[B]`.
    pub kv_lens: Vec<u32>,
    /// Block ids of each row, `[B]`. The rows of one sequence in several steps share a list, so that an executor finds
    /// what is new in a row without comparing it. A row of padding has no blocks.
    pub block_tables: Vec<BlockIds>,
    /// The rows, in order, `[B]`.
    pub rows: Vec<StepRow>,
    /// Which tokens of the step need logits and how to sample them.
    pub samples: Vec<SampleRow>,
    /// Tokens to count before they are drawn, of sequences with penalties.
    pub counts: Vec<CountUpdate>,
    /// What the model needs to know besides the KV cache, in the order of the rows.
    pub state: Vec<R>,
}

/// One sequence's chunk in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepRow {
    /// The request.
    pub id: RequestId,
    /// Where the scheduler finds its sequence.
    pub sequence: usize,
    /// Tokens whose KV is in the cache after this step, drafts not counted.
    pub computed: usize,
    /// Draft tokens at the end of the row: its last samples verify them, see [`speculation`](super::speculation).
    pub drafts: usize,
    /// The token that follows the row, where it is known because the row ends within the text; the row then verifies no
    /// drafts.
    pub next: Option<u32>,
    /// Drafts that the model itself makes behind this step, for the next one; its block table has capacity for as many tokens
    /// more. Not for a row with a `next`.
    pub model_drafts: usize,
}

/// One token to sample.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleRow {
    /// The request.
    pub id: RequestId,
    /// Index into `tokens` of the token whose logits are wanted.
    pub token: u32,
    /// Position of the token to be sampled; with the seed it names the random number.
    pub position: u64,
    /// The update by the request's logits processors; usually none.
    pub logits_update: Option<LogitsUpdate>,
    /// True while `logits_update` is not known: it depends on a token that a step in flight draws, or on a mask that is
    /// being computed. The forward pass does not need it.
    pub deferred: bool,
    /// How to draw.
    pub params: SamplingParams,
    /// Log-probabilities to report, see `GenerateRequest::logprobs`.
    pub logprobs: Option<usize>,
}

impl SampleRow {
    /// A sample that can only be `forced`, for the log-probabilities of a token that is known: `forced` is at `position` of
    /// the request's prompt, and index `token` of the step's tokens is the one before it.
    pub fn of_prompt(id: RequestId, token: u32, position: usize, forced: u32, logprobs: Option<usize>) -> Self {
        // No logit reaches this, and log-probabilities are of the raw ones.
        let edit = LogitEdit { token: forced, scale: 1.0, add: f32::MAX };
        let logits_update = Some(LogitsUpdate { edits: vec![edit], ..LogitsUpdate::default() });
        let (position, params) = (position as u64, SamplingParams::greedy());
        Self { id, token, position, logits_update, deferred: false, params, logprobs }
    }

    /// A sample that nobody reads, of index `token` of the step's tokens, for a graph of fixed shape.
    pub fn of_padding(token: u32) -> Self {
        let (id, params) = (RequestId(u64::MAX), SamplingParams::greedy());
        Self { id, token, position: 0, logits_update: None, deferred: false, params, logprobs: None }
    }
}

/// What the executor returns: one entry per `Step::samples`, in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// The sampled ids.
    pub tokens: Vec<u32>,
    /// Present where the row asked; empty if none did.
    pub logprobs: Vec<Option<TokenLogprobs>>,
    /// Tokens that the model drafts behind those of each row that count, [`StepRow::model_drafts`] of them; empty where it does not
    /// draft.
    pub drafts: Vec<Vec<u32>>,
    /// How long the drafts took, a part of the step's time.
    pub drafting_time: Duration,
}

impl<R> Step<R> {
    /// Most blocks of a row.
    pub fn max_blocks(&self) -> usize {
        self.block_tables.iter().map(BlockIds::len).max().unwrap_or(0)
    }
}

impl<R: Clone + Default> Step<R> {
    /// A step over KV blocks of `block_tokens` tokens, of `batch` equal rows that each add `tokens` tokens to `context - tokens` cached ones, see
    /// [`ragged`](Self::ragged).
    pub fn uniform(block_tokens: usize, batch: usize, tokens: usize, context: usize) -> Self {
        Self::ragged(block_tokens, &vec![(tokens, context); batch])
    }

    /// A step over KV blocks of `block_tokens` tokens. Each of `rows` is the number of tokens that a row adds and its
    /// context, these included; each row samples once. Blocks are numbered through; `state` is empty. For plans and benchmarks: no scheduler is asked.
    pub fn ragged(block_tokens: usize, rows: &[(usize, usize)]) -> Self {
        let max_blocks = rows.iter().map(|(_, context)| context.div_ceil(block_tokens)).max().unwrap_or(0);
        let mut step = Self { qo_indptr: vec![0], ..Self::default() };
        for (b, &(tokens, context)) in rows.iter().enumerate() {
            assert!(0 < tokens && tokens <= context);
            let (id, first) = (RequestId(b as u64), (b * max_blocks * block_tokens) as u32);
            step.positions.extend((context - tokens..context).map(|p| p as u32));
            step.slots.extend((context - tokens..context).map(|p| first + p as u32));
            // Ids that any vocabulary has, not all the same.
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
            });
        }
        step
    }

    /// Empties it; the memory of its parts stays.
    pub fn clear(&mut self) {
        let Self { tokens, positions, slots, qo_indptr, kv_lens, block_tables, rows, samples, .. } = self;
        for ids in [tokens, positions, slots, qo_indptr, kv_lens] {
            ids.clear();
        }
        block_tables.clear();
        rows.clear();
        samples.clear();
        self.counts.clear();
        self.state.clear();
    }

    /// This step over the blocks from number `first` on.
    pub fn over_blocks(mut self, block_tokens: usize, first: usize) -> Self {
        self.slots.iter_mut().for_each(|slot| *slot += (first * block_tokens) as u32);
        for blocks in &mut self.block_tables {
            *blocks = blocks.iter().map(|block| block + first as u32).collect();
        }
        self
    }

    /// This step with rows added until there are `rows`, for a graph of fixed shape. An added row has one token, attends
    /// to nothing, writes no KV, adds no `state`, and draws a token that nobody reads.
    pub fn padded(&self, rows: usize) -> Self {
        let mut step = self.clone();
        for row in self.rows.len()..rows {
            step.samples.push(SampleRow::of_padding(step.tokens.len() as u32));
            step.tokens.push(0);
            step.positions.push(0);
            step.slots.push(NO_SLOT);
            step.qo_indptr.push(step.tokens.len() as u32);
            step.kv_lens.push(0);
            let id = RequestId(u64::MAX);
            step.rows.push(StepRow { id, sequence: row, computed: 0, drafts: 0, next: None, model_drafts: 0 });
        }
        step.block_tables.resize(rows, BlockIds::default());
        step
    }

    /// True while the logits update of any sample is unknown.
    pub fn is_deferred(&self) -> bool {
        self.samples.iter().any(|sample| sample.deferred)
    }

    /// Whether every token is sampled, in order: then the rows that need logits are where they are wanted.
    pub fn samples_every_token(&self) -> bool {
        let in_order = self.samples.iter().zip(0..).all(|(sample, token)| sample.token == token);
        in_order && self.samples.len() == self.tokens.len()
    }

    /// As `qo_indptr`, of the sampled tokens alone, `[B + 1]`. `None` unless each of them is the last one of its row.
    pub fn sampled_indptr(&self) -> Option<Vec<u32>> {
        let mut samples = self.samples.iter().peekable();
        let mut indptr = vec![0];
        for &end in self.qo_indptr.iter().skip(1) {
            let sampled = samples.next_if(|sample| sample.token + 1 == end).is_some();
            indptr.push(indptr[indptr.len() - 1] + u32::from(sampled));
        }
        samples.next().is_none().then_some(indptr)
    }

    /// Fewest and most tokens of a row.
    pub fn queries(&self) -> (usize, usize) {
        let lengths = || self.qo_indptr.windows(2).map(|pair| (pair[1] - pair[0]) as usize);
        (lengths().min().unwrap_or(0), lengths().max().unwrap_or(0))
    }

    /// True when there is nothing to run.
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
