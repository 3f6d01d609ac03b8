//! What rules do to a row of logits.

use std::sync::Arc;

/// The tokens that may be drawn, one bit each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u32>,
}

impl TokenMask {
    /// Allows `ids`, all of them below `vocab_size`.
    pub fn new(ids: &[u32], vocab_size: usize) -> Self {
        let mut words = vec![0; vocab_size.div_ceil(32)];
        ids.iter().for_each(|id| words[*id as usize / 32] |= 1 << (id % 32));
        Self { words }
    }

    /// Takes words as [`words`](Self::words) gives them.
    pub fn from_words(words: Vec<u32>) -> Self {
        Self { words }
    }

    /// `[vocab / 32, rounded up]`; token `t` is bit `t % 32` of word `t / 32`.
    pub fn words(&self) -> &[u32] {
        &self.words
    }
}

/// What the rules do to the logit of one token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitEdit {
    /// The token.
    pub token: u32,
    /// Divides a logit above 0, multiplies another.
    pub scale: f32,
    /// Added afterwards; -inf is a ban.
    pub add: f32,
}

impl LogitEdit {
    /// The new logit, in f32 with every operation rounded.
    pub fn apply(self, logit: f32) -> f32 {
        (if logit > 0.0 { logit / self.scale } else { logit * self.scale }) + self.add
    }
}

/// What the rules do to one row of logits.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Adjustment {
    /// At most one for each token.
    pub edits: Vec<LogitEdit>,
    /// All other tokens become -inf; `None` allows all.
    pub allowed: Option<Arc<TokenMask>>,
}
