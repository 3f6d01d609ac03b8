//! The tokens that a grammar allows next.

use std::sync::Arc;

/// A bit mask over the vocabulary: token `t` is bit `t % 32` of word `t / 32`. Clones share the words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedTokens(Arc<[u32]>);

impl AllowedTokens {
    /// A mask that allows `ids`, which must be below `vocab_size`.
    pub(super) fn new(ids: &[u32], vocab_size: usize) -> Self {
        set(vec![0; vocab_size.div_ceil(32)], ids)
    }

    /// A mask from its first `vocab_size.div_ceil(32)` words; missing words allow nothing.
    pub(super) fn from_words(words: &[u32], vocab_size: usize) -> Self {
        let mut words = words.to_vec();
        words.resize(vocab_size.div_ceil(32), 0);
        Self(words.into())
    }

    /// The mask with additional `ids`.
    pub(super) fn with(&self, ids: &[u32]) -> Self {
        set(self.0.to_vec(), ids)
    }

    /// True if this token may come next.
    pub fn allows(&self, token: u32) -> bool {
        self.0.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// The words of the mask, `[ceil(vocab / 32)]`.
    pub fn words(&self) -> &Arc<[u32]> {
        &self.0
    }
}

fn set(mut words: Vec<u32>, ids: &[u32]) -> AllowedTokens {
    ids.iter().for_each(|id| words[*id as usize / 32] |= 1 << (id % 32));
    AllowedTokens(words.into())
}
