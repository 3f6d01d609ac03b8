//! Counts of tokens, and penalties that depend on them, as tensors of words.

use crate::limits::penalties as limits;
use pegainfer_core::logits_processors::{CountUpdate, CountedPenalties};

/// Words of a [`CountUpdate`]: slot, whether it starts, first token, end of the prompt's tokens, end of all.
pub const UPDATE_WORDS: usize = limits::UPDATE_WORDS;
/// Words of the penalties of a row: slot or [`NO_PENALTIES`], first draft, end of the drafts, bits of presence,
/// frequency and repetition.
pub const PENALTY_WORDS: usize = limits::PENALTY_WORDS;
/// Marks a row without penalties.
pub const NO_PENALTIES: u32 = limits::NO_SLOT;

/// Words of the counts of one sequence: two counts a word, and whole vectors of 16 bytes.
pub fn count_words(vocab: usize) -> usize {
    vocab.div_ceil(limits::COUNTS) * (limits::COUNTS / 2)
}

/// Updates of counts as the values of the tensors that [`count_tokens`](crate::ops::count_tokens()) reads.
#[derive(Debug, Default, PartialEq)]
pub struct PackedCountUpdates {
    /// `[updates, UPDATE_WORDS]`.
    pub updates: Vec<u32>,
    /// Tokens of all updates.
    pub tokens: Vec<u32>,
}

impl PackedCountUpdates {
    /// Packs the updates of a step.
    pub fn new(updates: &[CountUpdate]) -> Self {
        let mut packed = Self::default();
        for CountUpdate { slot, starts, prompt, generated } in updates {
            let first = packed.tokens.len();
            packed.tokens.extend_from_slice(prompt);
            let end_of_prompt = packed.tokens.len();
            packed.tokens.extend(generated);
            let bounds = [first, end_of_prompt, packed.tokens.len()].map(|at| at as u32);
            packed.updates.extend([*slot, u32::from(*starts)].into_iter().chain(bounds));
        }
        packed
    }
}

/// Penalties of some rows as the values of the tensors that [`penalize`](crate::ops::penalize()) reads.
#[derive(Debug, Default, PartialEq)]
pub struct PackedPenalties {
    /// `[rows, PENALTY_WORDS]`.
    pub rows: Vec<u32>,
    /// Drafts of all rows.
    pub drafts: Vec<u32>,
}

impl PackedPenalties {
    /// Packs one entry per row; `None` leaves the row unchanged.
    pub fn new<'a>(rows: impl Iterator<Item = Option<&'a CountedPenalties>>) -> Self {
        let mut packed = Self::default();
        for row in rows {
            let Some(CountedPenalties { penalties, slot, drafts }) = row else {
                packed.rows.extend([NO_PENALTIES, 0, 0, 0, 0, 0]);
                continue;
            };
            let first = packed.drafts.len();
            packed.drafts.extend(drafts);
            let weights = [penalties.presence, penalties.frequency, penalties.repetition].map(f32::to_bits);
            packed.rows.extend([*slot, first as u32, packed.drafts.len() as u32].into_iter().chain(weights));
        }
        packed
    }
}
