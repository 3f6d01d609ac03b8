//! Logits processors of some rows as tensors of words.

use crate::limits::adjust as limits;
use pegainfer_core::logits_processors::{LogitsUpdate, TokenMask};
use std::sync::Arc;

/// Words of a row's span: its first edit, the end of its edits, its mask or [`NO_MASK`].
pub const SPAN_WORDS: usize = limits::SPAN_WORDS;
/// Words of an edit: token, then the bits of scale and addend.
pub const EDIT_WORDS: usize = limits::EDIT_WORDS;
/// Marks a row without a mask: every token is allowed.
pub const NO_MASK: u32 = limits::NO_MASK;

/// Logits updates of some rows as the values of the tensors that [`adjust_logits`](crate::ops::adjust_logits()) reads.
#[derive(Debug, Default, PartialEq)]
pub struct PackedLogitsUpdates {
    /// `[rows, SPAN_WORDS]`.
    pub spans: Vec<u32>,
    /// `[edits, EDIT_WORDS]`.
    pub edits: Vec<u32>,
    /// `[masks, vocab / 32, rounded up]`; rows that share a mask share its words.
    pub masks: Vec<u32>,
}

impl PackedLogitsUpdates {
    /// Packs one entry per row; `None` leaves the row unchanged. `vocab`: columns of the logits; those after a mask are
    /// not allowed.
    pub fn new<'a>(rows: impl Iterator<Item = Option<&'a LogitsUpdate>>, vocab: usize) -> Self {
        let mut packed = Self::default();
        let mut masks: Vec<&Arc<TokenMask>> = Vec::new();
        for row in rows {
            let first = packed.edits.len() / EDIT_WORDS;
            let edits = row.into_iter().flat_map(|row| &row.edits);
            packed.edits.extend(edits.flat_map(|edit| [edit.token, edit.scale.to_bits(), edit.add.to_bits()]));
            let mask = row.and_then(|row| row.allowed.as_ref()).map_or(NO_MASK, |mask| {
                let known = masks.iter().position(|other| other.shares_words_with(mask));
                known.unwrap_or_else(|| {
                    masks.push(mask);
                    packed.masks.extend(mask.words());
                    packed.masks.resize(masks.len() * vocab.div_ceil(32), 0);
                    masks.len() - 1
                }) as u32
            });
            packed.spans.extend([first as u32, (packed.edits.len() / EDIT_WORDS) as u32, mask]);
        }
        packed
    }
}
