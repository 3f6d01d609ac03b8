//! Reference kernels of `ops::count_tokens` and `ops::penalize`.

use crate::limits::gather::PLACEHOLDER;
use crate::ops::{NO_PENALTIES, PENALTY_WORDS, UPDATE_WORDS};
use pegainfer_core::logits_processors::{Penalties, TokenCount};
use pegainfer_core::team;

/// The id that a token stands for.
pub fn resolved(token: u32, sampled: &[u32]) -> Option<u32> {
    if token & PLACEHOLDER == 0 { Some(token) } else { sampled.get((token ^ PLACEHOLDER) as usize).copied() }
}

/// The count of `token` in a sequence's words.
fn count(words: &[u32], token: usize) -> TokenCount {
    TokenCount::from_bits((words[token / 2] >> (token % 2 * 16)) as u16)
}

fn set_count(words: &mut [u32], token: usize, count: TokenCount) {
    let (word, shift) = (&mut words[token / 2], token % 2 * 16);
    *word = *word & !(0xffff << shift) | u32::from(count.bits()) << shift;
}

/// Adds the tokens of `updates` to `counts` (`[slots, words]`). Operands as in `ops::count_tokens`, checked there.
pub fn count_tokens(counts: &mut [u32], words: usize, updates: &[u32], tokens: &[u32], sampled: &[u32]) {
    for &[slot, starts, first, end_of_prompt, end] in updates.as_chunks::<UPDATE_WORDS>().0 {
        let row = &mut counts[slot as usize * words..][..words];
        if starts != 0 {
            row.fill(0);
        }
        for at in first..end {
            let Some(token) = resolved(tokens[at as usize], sampled) else { continue };
            let old = count(row, token as usize);
            set_count(row, token as usize, if at < end_of_prompt { old.with_prompt() } else { old.plus(1) });
        }
    }
}

/// Applies the penalties of each row to `logits` (`[rows, vocab]`), in parallel over the rows. Operands as in
/// `ops::penalize`, checked there.
pub fn penalize(logits: &mut [f32], vocab: usize, (counts, words): (&[u32], usize), rows: &[u32], drafts: &[u32]) {
    let rows = rows.as_chunks::<PENALTY_WORDS>().0;
    team::for_each_chunk(logits, vocab, |i, row| {
        let [slot, first, end, presence, frequency, repetition] = rows[i];
        if slot == NO_PENALTIES {
            return;
        }
        let [presence, frequency, repetition] = [presence, frequency, repetition].map(f32::from_bits);
        let penalties = Penalties { presence, frequency, repetition };
        let (counts, drafts) = (&counts[slot as usize * words..][..words], &drafts[first as usize..end as usize]);
        for (token, logit) in row.iter_mut().enumerate() {
            if drafts.is_empty() && counts[token / 2] == 0 {
                continue;
            }
            let drafted = drafts.iter().filter(|draft| **draft as usize == token).count();
            *logit = penalties.apply(count(counts, token).plus(drafted), *logit);
        }
    });
}
