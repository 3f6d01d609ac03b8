//! The unparsed text, and the position of a parser in it.

/// White space of JSON and of the templates.
pub const WHITESPACE: [char; 4] = [' ', '\n', '\r', '\t'];

/// Maximum white space between two tags that belong together, in bytes. It bounds the time spent on each token.
const MAX_GAP: usize = 64;

/// Whether an expected text comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    Yes,
    No,
    /// The text ends before that is certain.
    Maybe,
}

/// Position of a tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seek {
    /// The tag begins at this byte.
    Found(usize),
    /// The tag does not begin before this byte, where the text ends or may contain the beginning of the tag.
    Pending(usize),
}

impl Seek {
    /// The byte before which the tag does not begin.
    pub fn at(self) -> usize {
        match self {
            Self::Found(at) | Self::Pending(at) => at,
        }
    }
}

/// A buffer of text with a position. Positions are bytes.
#[derive(Debug, Default)]
pub struct Cursor {
    pub text: String,
    /// The position: everything before it was parsed.
    pub at: usize,
}

impl Cursor {
    /// Removes and returns the text before the position.
    pub fn take(&mut self) -> String {
        let rest = self.text.split_off(self.at);
        self.at = 0;
        std::mem::replace(&mut self.text, rest)
    }

    /// Removes and returns the text before `end`, except trailing `held` characters. The position moves after them, so that
    /// they are not parsed again: before the position there are only `held` characters, before and after the call.
    pub fn take_but(&mut self, end: usize, held: &[char]) -> String {
        let new = self.text[self.at..end].trim_end_matches(held).len();
        if new == 0 {
            self.at = end;
            return String::new();
        }
        self.at += new;
        let behind = end - self.at;
        let taken = self.take();
        self.at = behind;
        taken
    }

    /// The text from the position on.
    pub fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    /// The next byte.
    pub fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    /// Moves the position over white space.
    pub fn skip_whitespace(&mut self) {
        self.at = self.text.len() - self.rest().trim_start_matches(WHITESPACE).len();
    }

    /// Whether `expected` comes next. The position may be inside a character.
    pub fn next_is(&self, expected: &str) -> Next {
        begins(&self.text.as_bytes()[self.at..], expected)
    }

    /// Moves the position over `expected` if it comes next.
    pub fn eat(&mut self, expected: &str) -> Next {
        let next = self.next_is(expected);
        if next == Next::Yes {
            self.at += expected.len();
        }
        next
    }

    /// Searches for `tag` from the position on. `tag` has a `<` at its beginning and nowhere else.
    pub fn seek(&self, tag: &str) -> Seek {
        let rest = self.rest();
        if let Some(found) = rest.find(tag) {
            return Seek::Found(self.at + found);
        }
        let partial = rest.rfind('<').filter(|&i| begins(&rest.as_bytes()[i..], tag) == Next::Maybe);
        Seek::Pending(self.at + partial.unwrap_or(rest.len()))
    }
}

/// Whether `text` begins with `expected`.
pub fn begins(text: &[u8], expected: &str) -> Next {
    if text.starts_with(expected.as_bytes()) {
        Next::Yes
    } else if expected.as_bytes().starts_with(text) {
        Next::Maybe
    } else {
        Next::No
    }
}

/// Whether `text` begins with `expected` after optional white space.
pub fn begins_after_space(text: &str, expected: &str) -> Next {
    let inside = text.trim_start_matches(WHITESPACE);
    if text.len() - inside.len() > MAX_GAP { Next::No } else { begins(inside.as_bytes(), expected) }
}
