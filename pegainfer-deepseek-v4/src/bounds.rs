//! The largest step of an engine, and how much it keeps.

use crate::config::DSpark;

/// Prompt steps in which ranks share work that each could do alone, at the cost of an exchange.
#[derive(Debug, Clone, Copy)]
pub struct Sharing {
    /// Minimum number of indexer scores in a step (tokens times entries that their sequences may have) for which each
    /// rank computes the scores of a part of the tokens.
    pub scores: usize,
    /// Minimum number of tokens in a step for which each rank holds the residual streams of a part of the tokens.
    pub tokens: usize,
}

impl Sharing {
    /// For official shapes on two H200s: half of the scores take as long as the exchange, and from 512 tokens on a sum
    /// over the ranks is bound by bandwidth.
    pub const OFFICIAL: Self = Self { scores: 4 << 20, tokens: 512 };
    /// Sharing in every prompt step, for tests of small models.
    pub const ALWAYS: Self = Self { scores: 0, tokens: 0 };
}

/// Largest step an executor is built for.
#[derive(Debug, Clone, Copy)]
pub struct StepBounds {
    /// Input tokens.
    pub tokens: usize,
    /// Rows: sequences of a step.
    pub rows: usize,
    /// Maximum number of samples.
    pub samples: usize,
    /// Number of drafts that a row verifies. The rings of a slot are longer by this number of tokens.
    pub drafts: usize,
    /// Tokens of context.
    pub context: usize,
    /// Slots of recent tokens.
    pub slots: usize,
    /// Pages of compressed entries.
    pub pages: usize,
    /// Work that ranks share.
    pub sharing: Sharing,
    /// A GPU replays steps of few tokens as graphs.
    pub graphs: bool,
}

impl StepBounds {
    /// Maximum number of blocks in a pass of DSpark's stages, with a sampler that computes the logits of `logits_rows`
    /// samples at once: one per row, limited by the tokens and samples of a step.
    pub fn blocks(&self, numbers: &DSpark, logits_rows: usize) -> usize {
        self.rows.min(self.tokens / numbers.block.tokens).min(self.samples.min(logits_rows) / self.drafts.max(1)).max(1)
    }
}
