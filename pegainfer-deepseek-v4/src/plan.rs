//! One step's work, as the scheduler hands it to the executor.

use pegainfer_core::engine::{RequestId, TokenLogprobs};
use pegainfer_core::rules::Adjustment;
use pegainfer_core::sampling::SamplingParams;
pub use pegainfer_kernels::ops::deepseek_v4::PAGE_TOKENS;

/// A ragged batch: every row is one sequence's next tokens, prefill chunks and decode tokens alike.
///
/// `T` = tokens of the step, `B` = rows. Only what the rows need is here: the executor knows no request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Step {
    /// Input ids, `[T]`.
    pub tokens: Vec<u32>,
    /// Absolute position of each, `[T]`; a row's positions follow each other.
    pub positions: Vec<u32>,
    /// Row `b` owns tokens `qo_indptr[b]..qo_indptr[b + 1]`, `[B + 1]`.
    pub qo_indptr: Vec<u32>,
    /// Where each row's sequence keeps its newest tokens, `[B]`.
    pub slots: Vec<u32>,
    /// Pages of each row, padded with 0 to `max_pages`, `[B, max_pages]`. Page `j` of a row has the compressed entries of
    /// its tokens `128 j` to `128 j + 127`.
    pub page_tables: Vec<u32>,
    /// Row stride of `page_tables`.
    pub max_pages: usize,
    /// What is copied between slots before the step: from, to.
    pub copies: Vec<(u32, u32)>,
    /// What is copied between slots after it: from, to.
    pub snapshots: Vec<(u32, u32)>,
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
    /// Tokens of it that have been computed after this step.
    pub computed: usize,
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
    /// What the request's rules do to the logits; usually nothing.
    pub adjustment: Option<Adjustment>,
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
    /// A step of `batch` equal rows that each add `tokens` tokens to `context - tokens` computed ones, and sample. Slots
    /// and pages are numbered through. For plans and tests: no scheduler is asked.
    pub fn uniform(batch: usize, tokens: usize, context: usize) -> Self {
        assert!(batch > 0 && 0 < tokens && tokens <= context);
        let max_pages = context.div_ceil(PAGE_TOKENS);
        let mut step = Self { qo_indptr: vec![0], max_pages, ..Self::default() };
        for b in 0..batch {
            // Ids that any vocabulary has, not all the same.
            let ids: Vec<u32> = (0..tokens).map(|t| ((b + t) % 1000) as u32).collect();
            let pages: Vec<u32> = (0..max_pages).map(|i| (b * max_pages + i) as u32).collect();
            step.push(RequestId(b as u64), &ids, context - tokens, b as u32, &pages);
            step.sample(RequestId(b as u64), context as u64);
        }
        step
    }

    /// Adds a row: the tokens of a sequence from position `first` on.
    pub fn push(&mut self, id: RequestId, tokens: &[u32], first: usize, slot: u32, pages: &[u32]) {
        let computed = first + tokens.len();
        self.tokens.extend_from_slice(tokens);
        self.positions.extend((first..computed).map(|p| p as u32));
        self.qo_indptr.push(self.tokens.len() as u32);
        self.slots.push(slot);
        self.page_tables.extend_from_slice(pages);
        self.page_tables.resize(self.slots.len() * self.max_pages, 0);
        self.rows.push(StepRow { id, computed });
    }

    /// Samples greedily after the last token so far.
    fn sample(&mut self, id: RequestId, position: u64) {
        let (token, params) = (self.tokens.len() as u32 - 1, SamplingParams::greedy());
        self.samples.push(SampleRow { id, token, position, adjustment: None, params, logprobs: None });
    }

    /// True when there is nothing to run.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}
