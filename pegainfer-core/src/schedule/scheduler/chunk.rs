//! A sequence's part of a step while the step is planned.

use crate::schedule::sequence::Sequence;

/// What a sequence has of a step.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    /// Tokens that it has to compute before the next one can be sampled, see [`Sequence::remaining`].
    pub remaining: usize,
    /// See [`Sequence::is_decoding`].
    pub decoding: bool,
    /// Tokens; 0 where it sits this step out.
    pub tokens: usize,
    /// Draft tokens behind them.
    pub drafts: Vec<u32>,
    /// Drafts that the model makes behind this step.
    pub model_drafts: usize,
}

impl Chunk {
    /// No tokens yet.
    #[inline]
    pub fn of<L: Default>(seq: &Sequence<L>) -> Self {
        let remaining = seq.remaining();
        Self { remaining, decoding: seq.is_decoding(remaining), ..Self::default() }
    }
}
