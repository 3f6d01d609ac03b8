//! Reads JSON from a model and rewrites it as strict JSON, one delta at a time.
//!
//! Valid JSON passes unchanged. Repairs control characters and unknown escapes in strings, unescaped quotes, lone
//! surrogates, Python's literals (`'…'`, `True`, `None`, tuples), missing or surplus commas and colons, members without
//! a value, repeated keys (the first one stays), words without quotes, numbers beyond doubles (they become strings),
//! brackets that do not match or are not closed, and nesting that parsers refuse.

use super::cursor::{Cursor, Next, any};
use super::json_text::{Segment, escaped, next_segment, word, word_value};
use std::collections::HashSet;

/// Maximum nesting of the output: like other parsers, serde_json refuses more than 128 levels.
const MAX_DEPTH: usize = 100;

/// Result of reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Read {
    More,
    /// The position is after the value.
    End,
    /// The position is at the tag that ends the call before the value is complete.
    CutShort,
}

#[derive(Debug)]
enum Level {
    /// An object with these keys.
    Object(HashSet<String>),
    /// An array; true if it has an element.
    Array(bool),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Before a value.
    Value,
    /// Before a key.
    Key,
    /// In a key with this quote.
    InKey(char),
    /// Before `:`.
    Colon,
    /// In a string with this quote.
    InString(char),
    /// After a value.
    Comma,
}

/// Reader of one value.
#[derive(Debug)]
pub struct JsonReader {
    step: Step,
    stack: Vec<Level>,
    /// White space, key and colon before the next value. They are written when the value begins.
    pending: String,
    /// The key before the next value, as JSON text without quotes.
    key: String,
    /// Depth of a value that is not written, because its key is repeated or its nesting is too deep.
    muted: Option<usize>,
    /// True if more was repaired than readers of Python literals accept.
    pub damaged: bool,
    /// Tags that end the value.
    closers: &'static [&'static str],
}

impl JsonReader {
    /// A reader before a value. One of `closers` ends the value even if it is incomplete.
    pub fn new(closers: &'static [&'static str]) -> Self {
        Self {
            step: Step::Value,
            stack: Vec::new(),
            pending: String::new(),
            key: String::new(),
            muted: None,
            damaged: false,
            closers,
        }
    }

    /// Reads as far as the text goes and appends the certain part to `out`.
    pub fn read(&mut self, cursor: &mut Cursor, out: &mut String) -> Read {
        loop {
            if let Some(read) = self.advance(cursor, out) {
                return read;
            }
        }
    }

    /// Closes all open brackets and strings at the end of the text. A member without a value is left out.
    pub fn close(&mut self, out: &mut String) {
        self.damaged = true;
        if let Step::InString(_) = self.step {
            self.write("\"", out);
            self.value_ends();
        }
        while let Some(level) = self.stack.last() {
            let bracket = if matches!(level, Level::Object(_)) { "}" } else { "]" };
            self.write(bracket, out);
            self.stack.pop();
            self.value_ends();
        }
    }

    /// Takes one step. Returns the result when no further step is possible.
    fn advance(&mut self, cursor: &mut Cursor, out: &mut String) -> Option<Read> {
        match self.step {
            Step::InString(quote) => return self.in_string(quote, cursor, out),
            Step::InKey(quote) => return self.in_key(quote, cursor),
            Step::Value | Step::Key | Step::Colon | Step::Comma => {}
        }
        let start = cursor.at;
        cursor.skip_whitespace();
        self.pending.push_str(&cursor.text[start..cursor.at]);
        match any(self.closers.iter().map(|tag| cursor.next_is(tag))) {
            Next::Yes => return Some(Read::CutShort),
            Next::Maybe => return Some(Read::More),
            Next::No => {}
        }
        let Some(next) = cursor.rest().chars().next() else { return Some(Read::More) };
        match (self.step, next) {
            (_, '}' | ']' | ')') => {
                cursor.at += 1;
                return self.close_bracket(next, out);
            }
            (Step::Value, '{' | '[' | '(') => {
                cursor.at += 1;
                self.open_bracket(next, out);
            }
            (Step::Value, '"' | '\'') => {
                cursor.at += 1;
                self.value_begins(out);
                self.write("\"", out);
                self.step = Step::InString(next);
            }
            (Step::Key, '"' | '\'') => {
                cursor.at += 1;
                self.key.clear();
                self.step = Step::InKey(next);
            }
            (Step::Colon, ':') => {
                cursor.at += 1;
                self.pending.push(':');
                self.step = Step::Value;
            }
            (Step::Comma, ',') => {
                cursor.at += 1;
                self.next_member();
            }
            // A comma is missing.
            (Step::Comma, _) => {
                self.damaged = true;
                self.step = self.member();
            }
            // A value or a key is missing.
            (Step::Value | Step::Key | Step::Colon, ',') => {
                self.damaged = true;
                cursor.at += 1;
                self.next_member();
            }
            // A colon is missing.
            (Step::Colon, _) => {
                self.damaged = true;
                self.pending.push_str(": ");
                self.step = Step::Value;
            }
            (Step::Key, '{' | '[' | '(' | ':') | (Step::Value, ':') => {
                self.damaged = true;
                cursor.at += 1;
            }
            (Step::Value | Step::Key, _) => return self.word(cursor, out),
            (Step::InKey(_) | Step::InString(_), _) => {}
        }
        None
    }

    fn write(&self, text: &str, out: &mut String) {
        if self.muted.is_none() {
            out.push_str(text);
        }
    }

    /// The step before the next member of the innermost bracket.
    fn member(&self) -> Step {
        if matches!(self.stack.last(), Some(Level::Object(_))) { Step::Key } else { Step::Value }
    }

    fn next_member(&mut self) {
        self.pending.clear();
        self.step = self.member();
    }

    /// Writes the text before a value, unless its key already has a value.
    fn value_begins(&mut self, out: &mut String) {
        let pending = std::mem::take(&mut self.pending);
        if self.muted.is_some() {
            return;
        }
        let depth = self.stack.len();
        let follows = match self.stack.last_mut() {
            None => return,
            Some(Level::Array(any)) => std::mem::replace(any, true),
            Some(Level::Object(keys)) => {
                let key = serde_json::from_str(&format!("\"{}\"", self.key)).unwrap_or_else(|_| self.key.clone());
                let follows = !keys.is_empty();
                if !keys.insert(key) {
                    self.muted = Some(depth);
                    return;
                }
                follows
            }
        };
        self.write(if follows { "," } else { "" }, out);
        self.write(&pending, out);
    }

    fn value_ends(&mut self) {
        if self.muted == Some(self.stack.len()) {
            self.muted = None;
        }
        self.pending.clear();
        self.step = Step::Comma;
    }

    fn open_bracket(&mut self, bracket: char, out: &mut String) {
        self.value_begins(out);
        if self.stack.len() == MAX_DEPTH && self.muted.is_none() {
            self.write("null", out);
            self.muted = Some(MAX_DEPTH);
            self.damaged = true;
        }
        let object = bracket == '{';
        self.write(if object { "{" } else { "[" }, out);
        self.stack.push(if object { Level::Object(HashSet::new()) } else { Level::Array(false) });
        self.pending.clear();
        self.step = self.member();
    }

    /// Closes the innermost bracket of this kind, and those inside it; ignores a closer without an opener.
    fn close_bracket(&mut self, closer: char, out: &mut String) -> Option<Read> {
        let is_object = |level: &Level| matches!(level, Level::Object(_));
        let Some(depth) = self.stack.iter().rposition(|level| is_object(level) == (closer == '}')) else {
            self.damaged = true;
            return self.stack.is_empty().then_some(Read::End);
        };
        let pending = std::mem::take(&mut self.pending);
        if pending.trim().is_empty() {
            self.write(&pending, out);
        }
        self.damaged |= depth + 1 < self.stack.len() || !pending.trim().is_empty();
        while self.stack.len() > depth {
            let bracket = if self.stack.last().is_some_and(is_object) { "}" } else { "]" };
            self.write(bracket, out);
            self.stack.pop();
            self.value_ends();
        }
        self.stack.is_empty().then_some(Read::End)
    }

    fn in_string(&mut self, quote: char, cursor: &mut Cursor, out: &mut String) -> Option<Read> {
        let ends = match self.stack.last() {
            None => "",
            Some(Level::Object(_)) => ",}",
            Some(Level::Array(_)) => ",])",
        };
        match next_segment(cursor, quote, ends, self.closers) {
            Segment::Text(text) => self.write(&text, out),
            Segment::Repaired(text) => {
                self.damaged = true;
                self.write(&text, out);
            }
            Segment::More => return Some(Read::More),
            closed @ (Segment::Closed | Segment::CutShort) => {
                self.write("\"", out);
                self.value_ends();
                if closed == Segment::CutShort {
                    return Some(Read::CutShort);
                }
                return self.stack.is_empty().then_some(Read::End);
            }
        }
        None
    }

    fn in_key(&mut self, quote: char, cursor: &mut Cursor) -> Option<Read> {
        match next_segment(cursor, quote, ":,}", self.closers) {
            Segment::Text(text) | Segment::Repaired(text) => self.key.push_str(&text),
            Segment::More => return Some(Read::More),
            Segment::Closed => self.key_ends(),
            Segment::CutShort => {
                self.pending.clear();
                return Some(Read::CutShort);
            }
        }
        None
    }

    fn key_ends(&mut self) {
        self.pending.push_str(&format!("\"{}\"", self.key));
        self.step = Step::Colon;
    }

    /// Reads a key or value without quotes.
    fn word(&mut self, cursor: &mut Cursor, out: &mut String) -> Option<Read> {
        let is_key = self.step == Step::Key;
        let Some(text) = word(cursor, is_key, self.stack.is_empty(), self.closers) else { return Some(Read::More) };
        if is_key {
            self.damaged = true;
            self.key = escaped(&text);
            self.key_ends();
            return None;
        }
        self.value_begins(out);
        let (value, is_literal) = word_value(&text);
        self.damaged |= !is_literal;
        self.write(&value, out);
        self.value_ends();
        self.stack.is_empty().then_some(Read::End)
    }
}

/// A complete text as strict JSON; true if it was JSON or a Python literal.
pub fn whole(text: &str) -> (String, bool) {
    let mut cursor = Cursor::complete(text.trim());
    let (mut reader, mut out) = (JsonReader::new(&[]), String::new());
    let complete = reader.read(&mut cursor, &mut out) == Read::End && cursor.at == cursor.text.len();
    let sound = complete && !reader.damaged;
    if !complete {
        reader.close(&mut out);
    }
    (out, sound)
}
