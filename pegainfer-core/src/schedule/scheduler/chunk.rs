//! A sequence's part of a step while the step is planned.

use crate::schedule::sequence::Sequence;

/// The part of a step that one sequence gets.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    /// Tokens to compute before the next one can be sampled; see [`Sequence::remaining`].
    pub remaining: usize,
    /// True if it decodes; see [`Sequence::is_decoding`].
    pub decoding: bool,
    /// Number of tokens; 0 if the sequence skips the step.
    pub tokens: usize,
    /// Draft tokens after them.
    pub drafts: Vec<u32>,
    /// Number of drafts that the model makes after this step.
    pub model_drafts: usize,
}

impl Chunk {
    /// A chunk without tokens.
    #[inline]
    pub fn of<L: Default>(seq: &Sequence<L>) -> Self {
        let remaining = seq.remaining();
        Self { remaining, decoding: seq.is_decoding(remaining), ..Self::default() }
    }
}
