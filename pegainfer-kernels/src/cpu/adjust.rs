//! Reference kernel of `ops::adjust_logits`: logits processors.

use crate::ops::{EDIT_WORDS, NO_MASK, SPAN_WORDS};
use pegainfer_core::logits_processors::LogitEdit;
use pegainfer_core::team;

/// Applies the edits and the mask of its span to each row of `logits` (`[rows, vocab]`), in parallel over the rows.
/// Operands as in `ops::adjust_logits`, checked there.
pub fn adjust_rows(logits: &mut [f32], vocab: usize, spans: &[u32], edits: &[u32], masks: &[u32]) {
    let (spans, edits) = (spans.as_chunks::<SPAN_WORDS>().0, edits.as_chunks::<EDIT_WORDS>().0);
    let words = vocab.div_ceil(32);
    team::for_each_chunk(logits, vocab, |i, row| {
        let [first, end, mask] = spans[i];
        for &[token, scale, add] in &edits[first as usize..end as usize] {
            let edit = LogitEdit { token, scale: f32::from_bits(scale), add: f32::from_bits(add) };
            let logit = &mut row[token as usize];
            *logit = edit.apply(*logit);
        }
        if mask != NO_MASK {
            allow(row, &masks[mask as usize * words..][..words]);
        }
    });
}

/// Sets the logits of tokens whose bit is not set to -inf.
fn allow(row: &mut [f32], mask: &[u32]) {
    for (logits, bits) in row.chunks_mut(32).zip(mask) {
        for (i, logit) in logits.iter_mut().enumerate() {
            *logit = if bits >> i & 1 == 1 { *logit } else { f32::NEG_INFINITY };
        }
    }
}
