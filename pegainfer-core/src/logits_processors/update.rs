//! The update that logits processors make to the logits of one sample.

use super::CountedPenalties;
use std::sync::Arc;

/// A bit mask of the tokens that may be sampled. Clones share the words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMask {
    words: Arc<[u32]>,
}

impl TokenMask {
    /// A mask that allows `ids`, all of which must be below `vocab_size`.
    pub fn new(ids: &[u32], vocab_size: usize) -> Self {
        let mut words = vec![0; vocab_size.div_ceil(32)];
        ids.iter().for_each(|id| words[*id as usize / 32] |= 1 << (id % 32));
        Self { words: words.into() }
    }

    /// A mask from words in the layout of [`words`](Self::words).
    pub fn from_words(words: Arc<[u32]>) -> Self {
        Self { words }
    }

    /// True if this token is allowed.
    pub fn allows(&self, token: u32) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// True if both masks are views of the same words.
    pub fn shares_words_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.words, &other.words)
    }

    /// The words of the mask, `[ceil(vocab / 32)]`; token `t` is bit `t % 32` of word `t / 32`.
    pub fn words(&self) -> &[u32] {
        &self.words
    }
}

/// The change of one token's logit: see [`apply`](Self::apply).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitEdit {
    /// Token id.
    pub token: u32,
    /// Divides a positive logit, multiplies any other.
    pub scale: f32,
    /// Added afterwards; -inf bans the token.
    pub add: f32,
}

impl LogitEdit {
    /// The new logit, in f32, rounded after each operation.
    pub fn apply(self, logit: f32) -> f32 {
        (if logit > 0.0 { logit / self.scale } else { logit * self.scale }) + self.add
    }
}

/// The changes of the logits of one sample, in this order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LogitsUpdate {
    /// Penalties of the tokens that occur in the sequence.
    pub penalties: Option<CountedPenalties>,
    /// Edits of single logits, at most one per token.
    pub edits: Vec<LogitEdit>,
    /// Tokens outside this mask get the logit -inf; `None` allows all.
    pub allowed: Option<Arc<TokenMask>>,
}
