//! One step's work, as the scheduler hands it to the executor.

use pegainfer_core::engine::{RequestId, TokenLogprobs};
use pegainfer_core::sampling::SamplingParams;

/// A ragged batch: every row is one sequence's next tokens, prefill chunks and decode tokens alike.
///
/// `T` = tokens of the step, `B` = rows. Only what the rows need is here: the executor knows no request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Step {
    /// Input ids, `[T]`.
    pub tokens: Vec<u32>,
    /// Absolute position of each input token, `[T]`.
    pub positions: Vec<u32>,
    /// Where each input token's K and V go: `block * BLOCK_SIZE + row`, `[T]`.
    pub slots: Vec<u32>,
    /// Row `b` owns tokens `qo_indptr[b]..qo_indptr[b + 1]`, `[B + 1]`.
    pub qo_indptr: Vec<u32>,
    /// Tokens each row attends to, its own included, `[B]`.
    pub kv_lens: Vec<u32>,
    /// Block ids of each row, padded with 0 to `max_blocks`, `[B, max_blocks]`.
    pub block_tables: Vec<u32>,
    /// Row stride of `block_tables`.
    pub max_blocks: usize,
    /// The rows, in order, `[B]`.
    pub rows: Vec<StepRow>,
    /// Which tokens of the step need logits and how to sample them.
    pub samples: Vec<SampleRow>,
}

/// One sequence's share of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepRow {
    /// The request.
    pub id: RequestId,
    /// Tokens whose KV is in the cache after this step.
    pub computed: usize,
}

/// One token to sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampleRow {
    /// The request.
    pub id: RequestId,
    /// Index into `tokens` of the token whose logits are wanted.
    pub token: u32,
    /// Position of the token to be sampled; with the seed it names the random number.
    pub position: u64,
    /// How to draw.
    pub params: SamplingParams,
    /// Log-probabilities to report, see `GenerateRequest::logprobs`.
    pub logprobs: Option<usize>,
}

/// What the executor returns: one entry per `Step::samples`, in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// The sampled ids.
    pub tokens: Vec<u32>,
    /// Present where the row asked.
    pub logprobs: Vec<Option<TokenLogprobs>>,
}

impl Step {
    /// True when there is nothing to run.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}
