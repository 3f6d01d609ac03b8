//! Converts token ids to text, one token at a time.

use super::Tokenizer;

/// Turns a stream of token ids into text increments.
///
/// A code point whose bytes are spread over several tokens is held back until it is complete. The concatenated
/// increments, including [`finish`](Self::finish), equal the decoding of all ids at once. Each byte is processed a
/// bounded number of times: at most three bytes are held back.
#[derive(Debug, Default)]
pub struct Detokenizer {
    /// Bytes of an incomplete code point.
    pending: Vec<u8>,
    /// True if special tokens have text.
    show_special: bool,
}

impl Detokenizer {
    /// A detokenizer at the start of a text. Special tokens have no text unless `show_special`.
    pub fn new(show_special: bool) -> Self {
        Self { pending: Vec::new(), show_special }
    }

    /// Appends the text that this token completes to `out`.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, out: &mut String) {
        if tokenizer.is_special(id) && !self.show_special {
            return;
        }
        self.pending.extend_from_slice(&tokenizer.token_bytes(id));
        let mut start = 0;
        for chunk in self.pending.utf8_chunks() {
            out.push_str(chunk.valid());
            start += chunk.valid().len();
            let at_end = start + chunk.invalid().len() == self.pending.len();
            if chunk.invalid().is_empty() || (at_end && may_continue(chunk.invalid())) {
                break;
            }
            out.push(char::REPLACEMENT_CHARACTER);
            start += chunk.invalid().len();
        }
        self.pending.drain(..start);
    }

    /// Ends the text: an incomplete code point becomes U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&String::from_utf8_lossy(&self.pending));
        self.pending.clear();
    }
}

/// True if more bytes could complete a code point.
fn may_continue(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|e| e.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_testing::{self as testing, Rng};

    fn increments(tokenizer: &Tokenizer, ids: &[u32]) -> String {
        let (mut detokenizer, mut text) = (Detokenizer::new(false), String::new());
        for &id in ids {
            detokenizer.push(tokenizer, id, &mut text);
            assert!(detokenizer.pending.len() <= 3, "more than a partial code point is held back");
        }
        detokenizer.finish(&mut text);
        text
    }

    #[test]
    fn increments_add_up_to_the_full_decoding_of_random_tokens() {
        let tokenizer = Tokenizer::load(&testing::model_dir()).unwrap();
        let seed = testing::seed();
        let mut rng = Rng(seed);
        // The first 256 ids or so are single bytes; most sequences of them are invalid UTF-8.
        for case in 0..4000 {
            let limit = if case % 2 == 0 { 260 } else { 4110 };
            let ids: Vec<u32> = (0..rng.below(40)).map(|_| rng.below(limit) as u32).collect();
            assert_eq!(increments(&tokenizer, &ids), tokenizer.decode(&ids), "seed {seed}, case {case}");
        }
    }

    #[test]
    fn characters_of_several_tokens_come_out_whole() {
        let tokenizer = Tokenizer::load(&testing::model_dir()).unwrap();
        for text in ["héllo wörld", "日本語のテキスト", "🎉👩‍👩‍👧‍👦🏳️‍🌈", "a\u{2028}b", "\u{0}\u{7f}", "é"]
        {
            let ids = tokenizer.encode(text, false).unwrap();
            let (mut detokenizer, mut all) = (Detokenizer::new(false), String::new());
            for &id in &ids {
                let mut decoded = String::new();
                detokenizer.push(&tokenizer, id, &mut decoded);
                assert!(!decoded.contains(char::REPLACEMENT_CHARACTER), "{text:?} was split inside a character");
                all.push_str(&decoded);
            }
            assert_eq!(all, text);
        }
    }

    #[test]
    fn an_incomplete_character_at_the_end_becomes_one_replacement_character() {
        let tokenizer = Tokenizer::load(&testing::model_dir()).unwrap();
        let mut ids = tokenizer.encode("🎉", false).unwrap();
        ids.pop();
        assert_eq!(increments(&tokenizer, &ids), "\u{fffd}");
    }
}
