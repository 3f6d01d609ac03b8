//! The key-value pairs of a GGUF file.

use super::value::Value;
use std::collections::HashMap;

/// The pairs of a file, by key.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metadata(pub(super) HashMap<String, Value>);

impl Metadata {
    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// Number of pairs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True without any pair.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A non-negative integer; `None` if the key is missing.
    ///
    /// # Errors
    /// A clause that names the key and the type that it has. This holds for the other methods, too.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, String> {
        self.typed(key, "an integer of at least 0", Value::unsigned)
    }

    /// A number.
    pub fn number(&self, key: &str) -> Result<Option<f64>, String> {
        self.typed(key, "a finite number", Value::number)
    }

    /// A boolean.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, String> {
        self.typed(key, "a boolean", Value::flag)
    }

    /// A text.
    pub fn text(&self, key: &str) -> Result<Option<String>, String> {
        self.typed(key, "a text", Value::text)
    }

    /// A list of texts.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&str>>, String> {
        let Some(texts) = self.typed(key, "an array of texts", Value::texts)? else { return Ok(None) };
        let valid = texts
            .enumerate()
            .map(|(i, text)| std::str::from_utf8(text).map_err(|_| format!("element {i} of {key} is not valid UTF-8")));
        valid.collect::<Result<_, _>>().map(Some)
    }

    /// A list of non-negative integers.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<u64>>, String> {
        self.typed(key, "an array of integers of at least 0", Value::integers)
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wrong = || format!("{key} is {}, and must be {expected}", value.words());
        read(value).map(Some).ok_or_else(wrong)
    }
}
