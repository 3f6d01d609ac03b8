//! Drafts from the sequence's own text: the continuation of an earlier match of its last tokens (prompt lookup). Needs
//! no weights. It helps where text repeats, for example when an agent rewrites a file that it has read.

use super::{DraftMethod, Drafter};
use std::collections::HashMap;
use std::hash::BuildHasher;
use std::ops::RangeInclusive;

/// Maximum number of earlier places compared with the end of the text, newest first.
const MAX_CANDIDATES: usize = 32;

/// N-gram drafts: the continuation of the longest, most recent earlier match of the last `ngram` tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptLookup {
    /// Minimum and maximum number of matching tokens; at least 1.
    pub ngram: RangeInclusive<usize>,
}

impl DraftMethod for PromptLookup {
    fn start(&self) -> Box<dyn Drafter> {
        Box::new(NgramDrafter { matches: Matches::new(*self.ngram.start()), longest: *self.ngram.end() })
    }
}

/// Suffix drafts: all earlier places that share the longest match with the end of the text vote on each token. Longer
/// matches and more agreement give longer drafts.
#[derive(Debug, Clone, PartialEq)]
pub struct Suffix {
    /// Maximum number of tokens of a match.
    pub max_match: usize,
    /// Draft tokens per token of the match.
    pub max_factor: f64,
    /// A draft ends before its estimated probability, its vote shares multiplied, falls below this.
    pub min_probability: f64,
}

impl DraftMethod for Suffix {
    fn start(&self) -> Box<dyn Drafter> {
        Box::new(SuffixDrafter { matches: Matches::new(1), method: self.clone() })
    }
}

/// Earlier occurrences of the last `gram` tokens, as a linked list per hash, as in a compressor's match finder. A place
/// is the number of tokens before it.
#[derive(Debug)]
struct Matches {
    gram: usize,
    /// Newest place of each hash.
    newest: HashMap<u64, u32>,
    /// For each place, the previous one with the same hash, or 0.
    earlier: Vec<u32>,
    hasher: std::hash::RandomState,
}

impl Matches {
    fn new(gram: usize) -> Self {
        Self { gram, newest: HashMap::new(), earlier: vec![0], hasher: std::hash::RandomState::new() }
    }

    /// Adds every place of `tokens` except the last one.
    fn enter(&mut self, tokens: &[u32]) {
        for place in self.earlier.len()..tokens.len() {
            let gram = place.checked_sub(self.gram).map(|start| self.hasher.hash_one(&tokens[start..place]));
            let earlier = gram.and_then(|hash| self.newest.insert(hash, place as u32));
            self.earlier.push(earlier.unwrap_or(0));
        }
    }

    /// Earlier places where `gram` to `longest` tokens match the end of `tokens`, newest first, with the match length.
    fn find(&self, tokens: &[u32], longest: usize) -> Vec<(usize, usize)> {
        let Some(start) = tokens.len().checked_sub(self.gram) else { return Vec::new() };
        let hash = self.hasher.hash_one(&tokens[start..]);
        let mut place = self.newest.get(&hash).copied().unwrap_or(0) as usize;
        let mut found = Vec::new();
        for _ in 0..MAX_CANDIDATES {
            if place == 0 {
                break;
            }
            let pairs = tokens[..place].iter().rev().zip(tokens.iter().rev());
            let length = pairs.take(longest).take_while(|(a, b)| a == b).count();
            if length >= self.gram {
                found.push((place, length));
            }
            place = self.earlier[place] as usize;
        }
        found
    }
}

/// The token at `place + i`, or the draft's own token if the text repeats itself.
fn following(tokens: &[u32], draft: &[u32], place: usize) -> Option<u32> {
    let at = place + draft.len();
    tokens.get(at).or_else(|| draft.get(at.checked_sub(tokens.len())?)).copied()
}

#[derive(Debug)]
struct NgramDrafter {
    matches: Matches,
    longest: usize,
}

impl Drafter for NgramDrafter {
    fn propose(&mut self, tokens: &[u32], max_drafts: usize) -> Vec<u32> {
        self.matches.enter(tokens);
        let found = self.matches.find(tokens, self.longest);
        // The newest of the longest matches.
        let Some((place, _)) = found.into_iter().rev().max_by_key(|(_, length)| *length) else { return Vec::new() };
        let mut draft = Vec::with_capacity(max_drafts);
        while draft.len() < max_drafts
            && let Some(token) = following(tokens, &draft, place)
        {
            draft.push(token);
        }
        draft
    }
}

#[derive(Debug)]
struct SuffixDrafter {
    matches: Matches,
    method: Suffix,
}

impl Drafter for SuffixDrafter {
    fn propose(&mut self, tokens: &[u32], max_drafts: usize) -> Vec<u32> {
        self.matches.enter(tokens);
        let mut found = self.matches.find(tokens, self.method.max_match);
        let longest = found.iter().map(|(_, length)| *length).max().unwrap_or(0);
        found.retain(|(_, length)| *length == longest);
        let max_drafts = max_drafts.min((longest as f64 * self.method.max_factor) as usize);
        let (mut draft, mut probability) = (Vec::with_capacity(max_drafts), 1.0);
        while draft.len() < max_drafts {
            let votes: Vec<u32> = found.iter().filter_map(|(place, _)| following(tokens, &draft, *place)).collect();
            let count = |token: u32| votes.iter().filter(|vote| **vote == token).count();
            // Ties go to the newest token.
            let Some(token) = votes.iter().copied().rev().max_by_key(|token| count(*token)) else { break };
            probability *= count(token) as f64 / votes.len() as f64;
            if probability < self.method.min_probability {
                break;
            }
            found.retain(|(place, _)| following(tokens, &draft, *place) == Some(token));
            draft.push(token);
        }
        draft
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ngram(min: usize, max: usize) -> Box<dyn Drafter> {
        PromptLookup { ngram: min..=max }.start()
    }

    fn suffix() -> Box<dyn Drafter> {
        Suffix { max_match: 24, max_factor: 1.0, min_probability: 0.4 }.start()
    }

    #[test]
    fn ngrams_go_on_as_after_the_newest_of_the_longest_matches() {
        let text = [1, 2, 3, 9, 9, 2, 3, 7, 7, 2, 3, 8, 1, 2, 3];
        assert_eq!(ngram(2, 2).propose(&text, 2), [8, 1], "two tokens match everywhere: the newest place");
        assert_eq!(ngram(2, 3).propose(&text, 2), [9, 9], "three tokens match at the beginning");
        assert_eq!(ngram(4, 5).propose(&text, 2), [0; 0]);
        assert_eq!(ngram(1, 1).propose(&[4], 2), [0; 0], "the end does not match itself");
        assert_eq!(ngram(3, 3).propose(&[4, 4], 2), [0; 0], "a text that is shorter than the match");
    }

    #[test]
    fn a_text_that_repeats_itself_is_drafted_beyond_its_end() {
        assert_eq!(ngram(2, 3).propose(&[5, 6, 7, 5, 6, 7, 5, 6], 7), [7, 5, 6, 7, 5, 6, 7]);
        assert_eq!(ngram(1, 3).propose(&[5, 5], 4), [5; 4]);
    }

    #[test]
    fn drafts_are_those_of_the_whole_text_however_it_came() {
        let text: Vec<u32> = (0..400u32).map(|i| i.wrapping_mul(i) % 11).collect();
        let mut drafters = [ngram(1, 4), suffix()];
        for end in 1..text.len() {
            for (drafter, fresh) in drafters.iter_mut().zip([ngram(1, 4), suffix()].iter_mut()) {
                assert_eq!(drafter.propose(&text[..end], 5), fresh.propose(&text[..end], 5), "after {end} tokens");
            }
        }
    }

    #[test]
    fn suffixes_are_drafted_as_far_as_the_matches_agree() {
        // 1, 2 is followed by 3 twice and by 4 once; then 3 by 5 once and by 6 once.
        let text = [1, 2, 3, 5, 1, 2, 4, 5, 1, 2, 3, 6, 1, 2];
        assert_eq!(suffix().propose(&text, 5), [3], "6 would have a third");
        let certain = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3];
        assert_eq!(suffix().propose(&certain, 9), [4, 5, 6], "as long as the match");
        assert_eq!(suffix().propose(&certain, 2), [4, 5]);
        assert_eq!(suffix().propose(&[1, 2, 3], 2), [0; 0]);
    }
}
