//! Drafts that are often right.

use crate::device::{kv_value, next_token};
use crate::requests::{Rng, VOCAB, mix};
use pegainfer_core::schedule::speculation::{DraftMethod, DraftSource, Drafter, ModelMethod, Speculation};
use std::sync::Arc;

/// Predicts the device's tokens, apart from logits processors, but is wrong in `wrong` percent of the cases.
#[derive(Debug, Clone)]
pub struct Oracle {
    wrong: u64,
}

impl Oracle {
    /// An oracle with a random share of wrong drafts.
    pub fn new(rng: &mut Rng) -> Self {
        Self::of([0, 10, 50, 90][rng.below(4)])
    }

    /// An oracle with `wrong` percent of wrong drafts.
    pub fn of(wrong: u64) -> Self {
        Self { wrong }
    }

    /// A random number of its drafts, from the host or from the device.
    pub fn speculation(&self, rng: &mut Rng) -> Speculation {
        let source = if rng.chance(50) {
            DraftSource::Model(ModelMethod::Mtp)
        } else {
            DraftSource::Host(Arc::new(self.clone()))
        };
        Speculation {
            num_tokens: 1 + rng.below(6),
            source,
            adaptive: rng.chance(50),
            draft_vocab_size: None,
            synthetic_acceptance_length: None,
        }
    }

    /// `max_drafts` tokens after the prefix with this hash.
    pub fn tokens(&self, mut hash: u64, max_drafts: usize) -> Vec<u32> {
        let draft = |_| {
            let token = next_token(hash, |_, logit| logit);
            let wrong = mix(hash ^ 1) % 100 < self.wrong;
            let token = if wrong { (token + 1) % VOCAB } else { token };
            hash = kv_value(hash, token);
            token
        };
        (0..max_drafts).map(draft).collect()
    }
}

impl DraftMethod for Oracle {
    fn start(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }
}

impl Drafter for Oracle {
    fn propose(&mut self, tokens: &[u32], max_drafts: usize) -> Vec<u32> {
        let hash = tokens.iter().fold(0, |hash, token| kv_value(hash, *token));
        // Sometimes it has nothing to say.
        Self::tokens(self, hash, if mix(hash).is_multiple_of(5) { 0 } else { max_drafts })
    }
}
