//! Hashes of prompts and outputs in a recording.

use ring::digest::SHA256_OUTPUT_LEN;
use ring::hmac::{Context, Key};

/// Tokens per hashed block, equal to a KV block.
const BLOCK: usize = 16;

/// Hashes of the complete blocks of a text. Each depends on a salt and on all tokens up to its end: the first 8 bytes
/// of HMAC-SHA256 over the previous hash and the block's tokens.
#[derive(Debug, Clone)]
pub struct Chain {
    key: Key,
    last: [u8; SHA256_OUTPUT_LEN],
    /// Tokens of the incomplete last block.
    tail: Vec<u32>,
    /// Hashes since the last call of [`extend`](Self::extend).
    new: Vec<String>,
}

impl Chain {
    /// The chain of an empty text.
    pub fn new(key: Key, salt: u64) -> Self {
        let mut last = [0; SHA256_OUTPUT_LEN];
        last[..8].copy_from_slice(&salt.to_le_bytes());
        Self { key, last, tail: Vec::with_capacity(BLOCK), new: Vec::new() }
    }

    /// Appends tokens and returns the hashes of the blocks that they complete.
    pub fn extend(&mut self, ids: &[u32]) -> Vec<String> {
        ids.iter().for_each(|id| self.push(*id));
        std::mem::take(&mut self.new)
    }

    /// Appends one token.
    pub fn push(&mut self, id: u32) {
        self.tail.push(id);
        if self.tail.len() < BLOCK {
            return;
        }
        let mut context = Context::with_key(&self.key);
        context.update(&self.last);
        self.tail.drain(..).for_each(|id| context.update(&id.to_le_bytes()));
        self.last.copy_from_slice(context.sign().as_ref());
        self.new.push(self.last[..8].iter().map(|byte| format!("{byte:02x}")).collect());
    }

    /// Hashes of the blocks that were completed since the last call of [`extend`](Self::extend).
    pub fn into_new(self) -> Vec<String> {
        self.new
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ring::hmac::HMAC_SHA256;

    #[test]
    fn texts_share_the_hashes_of_their_common_prefix() {
        let chain = |key: u8, salt| Chain::new(Key::new(HMAC_SHA256, &[key; 32]), salt);
        let text: Vec<u32> = (0..50).collect();
        let whole = chain(1, 0).extend(&text);
        assert_eq!(whole.len(), 3, "of whole blocks only");
        let mut other = text.clone();
        other[20] = 99;
        let other = chain(1, 0).extend(&other);
        assert!(other[0] == whole[0] && other[1] != whole[1] && other[2] != whole[2]);
        let mut grown = chain(1, 0);
        assert_eq!(grown.extend(&text[..20]), whole[..1]);
        text[20..].iter().for_each(|id| grown.push(*id));
        assert_eq!(grown.into_new(), whole[1..], "a later prompt finds the output");
        assert!(chain(2, 0).extend(&text)[0] != whole[0] && chain(1, 7).extend(&text)[0] != whole[0]);
    }
}
