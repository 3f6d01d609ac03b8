//! The largest step of an engine, and how much it keeps.

use crate::config::DSpark;

/// Default of [`StepBounds::shared_scores`]: for official shapes on two H200s, half of the scores take as long as the exchange.
pub const SHARED_SCORES: usize = 4 << 20;

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
    /// Scores of the indexer in a step, its tokens times the entries that their sequences may have, from which on ranks share them and
    /// exchange what they chose.
    pub shared_scores: usize,
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
