//! The largest step of an engine, and how much it keeps.

use crate::config::DSpark;

/// The steps of prompts in which ranks share work that each of them could do alone, at the price of an exchange.
#[derive(Debug, Clone, Copy)]
pub struct Sharing {
    /// Fewest scores of the indexer in a step, its tokens times the entries that their sequences may have, of which each rank computes a part:
    /// those of some tokens.
    pub scores: usize,
    /// Fewest tokens of a step of whose residual streams each rank has a part: those of some tokens.
    pub tokens: usize,
}

impl Sharing {
    /// For official shapes on two H200s: half of the scores take as long as the exchange, and from 512 tokens on a sum over the ranks is
    /// bound by its bytes.
    pub const OFFICIAL: Self = Self { scores: 4 << 20, tokens: 512 };
    /// In every step of prompts, for tests of small models.
    pub const ALWAYS: Self = Self { scores: 0, tokens: 0 };
}

/// Largest step an executor is built for.
#[derive(Debug, Clone, Copy)]
pub struct StepBounds {
    /// Input tokens.
    pub tokens: usize,
    /// Rows: sequences of a step.
    pub rows: usize,
    /// Tokens behind which a token is sampled.
    pub samples: usize,
    /// Draft tokens that a row verifies. The rings of a slot are longer by as many tokens.
    pub drafts: usize,
    /// Tokens of context.
    pub context: usize,
    /// Slots of recent tokens.
    pub slots: usize,
    /// Pages of compressed entries.
    pub pages: usize,
    /// What ranks share.
    pub sharing: Sharing,
    /// A GPU replays steps of few tokens as graphs.
    pub graphs: bool,
}

impl StepBounds {
    /// Blocks of a pass of DSpark's stages at most, where a sampler computes the logits of `logits_rows` samples at once: as many as
    /// there are rows, but no more than whose tokens and samples fit a step.
    pub fn blocks(&self, numbers: &DSpark, logits_rows: usize) -> usize {
        self.rows.min(self.tokens / numbers.block.tokens).min(self.samples.min(logits_rows) / self.drafts.max(1)).max(1)
    }
}
