//! Work that ranks share.

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
