//! Counts the values of a JSON text before it is parsed, because each costs memory.

use memchr::{memchr, memchr2};

/// Upper bound on the number of values of a JSON text that arrives in parts: one, plus its commas, colons and opening
/// brackets outside of strings. Text that is not JSON is counted in the same way.
#[derive(Debug, Default)]
pub struct ValueCounter {
    separators: usize,
    in_string: bool,
    /// True if the last byte was a backslash in a string.
    escaped: bool,
}

impl ValueCounter {
    /// Counts the next part.
    pub fn push(&mut self, mut part: &[u8]) {
        while !part.is_empty() {
            if std::mem::take(&mut self.escaped) {
                part = &part[1..];
            } else if self.in_string {
                let Some(at) = memchr2(b'"', b'\\', part) else { return };
                self.escaped = part[at] == b'\\';
                self.in_string = self.escaped;
                part = &part[at + 1..];
            } else {
                let quote = memchr(b'"', part);
                let outside = &part[..quote.unwrap_or(part.len())];
                self.separators += outside.iter().filter(|byte| matches!(byte, b',' | b':' | b'[' | b'{')).count();
                self.in_string = quote.is_some();
                part = &part[(outside.len() + 1).min(part.len())..];
            }
        }
    }

    /// The number of values so far.
    pub fn values(&self) -> usize {
        self.separators + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_testing::{self as testing, Rng};
    use serde_json::{Value, json};

    fn count(text: &[u8], cut: usize) -> usize {
        let mut counter = ValueCounter::default();
        text.chunks(cut).for_each(|part| counter.push(part));
        counter.values()
    }

    /// Number of values of a tree; a name counts as one.
    fn values(tree: &Value) -> usize {
        1 + match tree {
            Value::Array(list) => list.iter().map(values).sum(),
            Value::Object(map) => map.values().map(|value| 1 + values(value)).sum(),
            _ => 0,
        }
    }

    fn random_tree(rng: &mut Rng, depth: usize) -> Value {
        let parts = |rng: &mut Rng| (0..rng.below(4)).map(|_| random_tree(rng, depth - 1)).collect::<Vec<_>>();
        match rng.below(if depth == 0 { 3 } else { 5 }) {
            0 => json!(rng.below(9)),
            1 => json!(["", "\"", "a\\", "[,:{", "\\\",", "é"][rng.below(6)]),
            2 => Value::Null,
            3 => parts(rng).into(),
            _ => parts(rng).into_iter().enumerate().map(|(i, value)| (format!("\"{i},"), value)).collect(),
        }
    }

    #[test]
    fn the_count_covers_every_value_however_the_text_is_cut() {
        let mut rng = Rng(testing::seed());
        for _ in 0..2000 {
            let tree = random_tree(&mut rng, 4);
            let text = tree.to_string().into_bytes();
            let counted = count(&text, text.len());
            assert_eq!([1, 2, 3].map(|cut| count(&text, cut)), [counted; 3], "{tree}");
            assert!((values(&tree)..=2 * values(&tree)).contains(&counted), "{counted} of {tree}");
        }
    }

    #[test]
    fn text_is_not_counted() {
        assert_eq!(count(br#"{"prompt": "a, b: [c] {d} \" , e"}"#, 99), 3);
        assert_eq!(count(b"[0,0,0,0]", 99), 5);
    }
}
