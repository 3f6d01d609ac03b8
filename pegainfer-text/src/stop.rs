//! Stop strings, found regardless of token boundaries.

/// Searches for stop strings in a text that arrives in deltas.
///
/// The match that completes first wins; if several complete at the same byte, the longest wins. This rule depends on
/// single bytes, so the result does not depend on how the text is cut into deltas. Only text that may still become a
/// stop string is held back.
///
/// One Knuth-Morris-Pratt automaton per stop string makes the time linear in the text for all strings.
#[derive(Debug)]
pub struct StopScanner {
    patterns: Vec<Pattern>,
    /// Held-back text: the longest suffix that is the beginning of a stop string.
    held: String,
}

#[derive(Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// `fallback[n]`: length of the longest proper prefix that is also a suffix of the first `n` bytes.
    fallback: Vec<usize>,
    /// Number of bytes matched so far.
    matched: usize,
}

impl Pattern {
    fn new(text: &str) -> Self {
        let bytes = text.as_bytes().to_vec();
        let mut fallback = vec![0; bytes.len() + 1];
        let mut matched = 0;
        for n in 1..bytes.len() {
            while matched > 0 && bytes[n] != bytes[matched] {
                matched = fallback[matched];
            }
            matched += usize::from(bytes[n] == bytes[matched]);
            fallback[n + 1] = matched;
        }
        Self { bytes, fallback, matched: 0 }
    }

    /// Advances by one byte; true if the pattern is complete.
    fn step(&mut self, byte: u8) -> bool {
        while self.matched > 0 && byte != self.bytes[self.matched] {
            self.matched = self.fallback[self.matched];
        }
        self.matched += usize::from(byte == self.bytes[self.matched]);
        self.matched == self.bytes.len()
    }
}

impl StopScanner {
    /// Searches for `stops`, which must not be empty strings.
    pub fn new(stops: &[String]) -> Self {
        debug_assert!(stops.iter().all(|s| !s.is_empty()), "an empty stop string matches everywhere");
        Self { patterns: stops.iter().map(|s| Pattern::new(s)).collect(), held: String::new() }
    }

    /// Appends the text that cannot be part of a stop string to `out`. `Some(i)` means that stop string `i` was found:
    /// `out` ends where it begins, and the scanner must not be used again.
    pub fn push(&mut self, delta: &str, out: &mut String) -> Option<usize> {
        if self.patterns.is_empty() {
            out.push_str(delta);
            return None;
        }
        for (at, byte) in delta.bytes().enumerate() {
            let mut complete: Option<(usize, usize)> = None;
            for (index, pattern) in self.patterns.iter_mut().enumerate() {
                let length = pattern.bytes.len();
                if pattern.step(byte) && complete.is_none_or(|(longest, _)| length > longest) {
                    complete = Some((length, index));
                }
            }
            if let Some((length, index)) = complete {
                self.held.push_str(&delta[..=at]);
                let start = self.held.len() - length;
                out.push_str(&self.held[..start]);
                self.held.clear();
                return Some(index);
            }
        }
        self.held.push_str(delta);
        let keep = self.patterns.iter().map(|p| p.matched).max().unwrap_or(0);
        out.extend(self.held.drain(..self.held.len() - keep));
        None
    }

    /// Appends the held-back text at the end of the text.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_testing::{self as testing, Rng};

    fn scan<'a>(stops: &[&str], deltas: impl IntoIterator<Item = &'a str>) -> (String, Option<usize>) {
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let (mut scanner, mut out) = (StopScanner::new(&stops), String::new());
        for delta in deltas {
            if let Some(found) = scanner.push(delta, &mut out) {
                return (out, Some(found));
            }
        }
        scanner.finish(&mut out);
        (out, None)
    }

    /// Reference: the definition, by brute force over all prefixes.
    fn reference(stops: &[&str], text: &str) -> (String, Option<usize>) {
        for end in (1..=text.len()).filter(|&e| text.is_char_boundary(e)) {
            let hits = stops.iter().enumerate().filter(|(_, s)| text[..end].ends_with(*s));
            if let Some((i, stop)) = hits.max_by_key(|(i, s)| (s.len(), usize::MAX - i)) {
                return (text[..end - stop.len()].to_string(), Some(i));
            }
        }
        (text.to_string(), None)
    }

    #[test]
    fn finds_a_stop_string_across_deltas() {
        assert_eq!(scan(&["</end>"], ["ab</", "en", "d>cd"]), ("ab".into(), Some(0)));
        assert_eq!(scan(&["</end>"], ["ab</", "enx", "d>"]), ("ab</enxd>".into(), None));
        assert_eq!(scan(&["aab"], ["aa", "aab"]), ("aa".into(), Some(0)));
    }

    #[test]
    fn holds_back_only_what_may_become_a_stop_string() {
        let (mut scanner, mut out) = (StopScanner::new(&["\n\nQ:".to_string()]), String::new());
        assert_eq!(scanner.push("hello\n", &mut out), None);
        assert_eq!(out, "hello");
        assert_eq!(scanner.push("\n", &mut out), None);
        assert_eq!(out, "hello");
        assert_eq!(scanner.push("A", &mut out), None);
        assert_eq!(out, "hello\n\nA");
    }

    #[test]
    fn any_split_of_the_text_gives_the_same_result() {
        let seed = testing::seed();
        let mut rng = Rng(seed);
        let alphabet = ["a", "b", "é", "è", "🎉", "\n"];
        let word = |rng: &mut Rng, min: usize, max: usize| -> String {
            (0..min + rng.below(max - min)).map(|_| alphabet[rng.below(alphabet.len())]).collect()
        };
        for case in 0..20_000 {
            let stops: Vec<String> = (0..1 + rng.below(4)).map(|_| word(&mut rng, 1, 5)).collect();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let text = word(&mut rng, 0, 24);
            let mut deltas = vec![];
            let mut start = 0;
            for end in text.char_indices().map(|(i, _)| i).chain([text.len()]) {
                if rng.below(2) == 0 || end == text.len() {
                    deltas.push(&text[start..end]);
                    start = end;
                }
            }
            assert_eq!(scan(&stops, deltas), reference(&stops, &text), "seed {seed}, case {case}: {stops:?} {text:?}");
        }
    }
}
