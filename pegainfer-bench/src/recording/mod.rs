//! Recordings of a server's requests. `serve --record FILE` writes them; [`replay`](crate::replay) and
//! [`traces`](crate::traces) read them.

pub mod format;

use clap::ValueEnum;
use pegainfer_core::images::{self, IMAGE_KEY, ImageSpan};
use pegainfer_core::rng;
use serde::{Deserialize, Serialize};

/// Recorded content of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Prompts {
    /// Token ids, and everything else that decides the output: who can read the file can read the prompts
    Ids,
    /// A hash of each block of 16 tokens and of all before it, under a key that nobody keeps: which prompts share a
    /// prefix
    #[default]
    Hashes,
    /// Numbers of tokens
    Lengths,
}

/// Hash of a list of tokens: equal lists have equal hashes, on every machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenHash(u64);

impl TokenHash {
    /// Adds a token at the end.
    pub fn push(&mut self, id: u32) {
        self.0 = rng::mix(self.0.wrapping_add(rng::GOLDEN) ^ u64::from(id));
    }
}

impl std::fmt::Display for TokenHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A prompt whose images' tokens are replaced by a number of each image: prompts with equal keys share blocks of the
/// prefix cache.
pub fn keys(images: &[ImageSpan], prompt: &[u32]) -> Vec<u32> {
    let number = |&[a, b, c, d, ..]: &[u8; 32]| Some(u32::from_le_bytes([a, b, c, d]) & !IMAGE_KEY);
    images::keys(images, prompt, number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_tells_lists_apart() {
        let of = |ids: &[u32]| {
            let mut hash = TokenHash::default();
            ids.iter().for_each(|id| hash.push(*id));
            hash.to_string()
        };
        let all = [of(&[]), of(&[0]), of(&[0, 0]), of(&[1, 2]), of(&[2, 1]), of(&[1, 2, 0])];
        assert!((0..6).all(|i| (0..i).all(|j| all[i] != all[j])), "{all:?}");
        assert_eq!(of(&[1, 2]), all[3]);
    }
}
