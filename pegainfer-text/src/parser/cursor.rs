//! The unparsed text, and the position of a parser in it.

/// White space of JSON and of the templates.
pub const WHITESPACE: [char; 4] = [' ', '\n', '\r', '\t'];
/// White space within a line.
const BLANKS: [char; 2] = [' ', '\t'];

/// Maximum white space between two tags that belong together, in bytes. It bounds the time spent on each token.
const MAX_GAP: usize = 64;

/// Answer to a question about the next text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    Yes,
    No,
    /// The text ends too early to tell, and more may come.
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
#[derive(Debug)]
pub struct Cursor {
    pub text: String,
    /// The position: everything before it was parsed.
    pub at: usize,
    /// True if the model's output ends with the text.
    pub ended: bool,
    /// True if the buffer begins at the start of a line, or after blanks there.
    line_start: bool,
}

impl Default for Cursor {
    fn default() -> Self {
        Self { text: String::new(), at: 0, ended: false, line_start: true }
    }
}

impl Cursor {
    /// A cursor at the beginning of a complete text.
    pub fn complete(text: &str) -> Self {
        Self { text: text.to_owned(), ended: true, ..Self::default() }
    }

    /// An empty cursor that continues another one at byte `at`.
    pub fn continuing(other: &Self, at: usize) -> Self {
        Self { line_start: other.is_line_start(at), ..Self::default() }
    }

    /// Removes and returns the text before the position.
    pub fn take(&mut self) -> String {
        self.line_start = self.is_line_start(self.at);
        let rest = self.text.split_off(self.at);
        self.at = 0;
        std::mem::replace(&mut self.text, rest)
    }

    /// Removes and returns the text before `end`, except trailing `held` characters. The position moves after them, so
    /// that they are not parsed again. Invariant: before the position there are only `held` characters.
    pub fn take_but(&mut self, end: usize, held: &[char]) -> String {
        let new = self.text[self.at..end].trim_end_matches(held).len();
        if new == 0 {
            self.at = end;
            return String::new();
        }
        self.at += new;
        let after = end - self.at;
        let taken = self.take();
        self.at = after;
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

    /// Moves the position over the next character.
    pub fn skip_char(&mut self) {
        self.at += self.rest().chars().next().map_or(0, char::len_utf8);
    }

    /// True if only blanks precede this byte in its line.
    pub fn is_line_start(&self, at: usize) -> bool {
        let line = self.text[..at].trim_end_matches(BLANKS);
        if line.is_empty() { self.line_start } else { line.ends_with('\n') }
    }

    /// Tells whether `expected` comes next. The position may be inside a character.
    pub fn next_is(&self, expected: &str) -> Next {
        self.begins(self.at, expected)
    }

    /// Tells whether `expected` begins at byte `at`.
    pub fn begins(&self, at: usize, expected: &str) -> Next {
        let text = &self.text.as_bytes()[at..];
        if text.starts_with(expected.as_bytes()) {
            Next::Yes
        } else if expected.as_bytes().starts_with(text) {
            self.maybe()
        } else {
            Next::No
        }
    }

    /// The answer where the text ends too early: no if the output has ended.
    pub fn maybe(&self) -> Next {
        if self.ended { Next::No } else { Next::Maybe }
    }

    /// The byte after white space that begins at `at`; `None` if there is too much between two tags.
    pub fn after_space(&self, at: usize) -> Option<usize> {
        let inside = self.text[at..].trim_start_matches(WHITESPACE);
        let after = self.text.len() - inside.len();
        (after - at <= MAX_GAP).then_some(after)
    }

    /// Tells whether only white space follows this byte.
    pub fn ends_after_space(&self, at: usize) -> Next {
        match self.after_space(at) {
            Some(after) if after == self.text.len() => {
                if self.ended {
                    Next::Yes
                } else {
                    Next::Maybe
                }
            }
            _ => Next::No,
        }
    }

    /// Tells whether one of `tags` begins after white space at `at`.
    pub fn any_after_space(&self, at: usize, tags: &[&str]) -> Next {
        let Some(after) = self.after_space(at) else { return Next::No };
        any(tags.iter().map(|tag| self.begins(after, tag)))
    }

    /// True if the output ends at the position, or inside one of `tags` that begins there.
    pub fn ends_in(&self, tags: &[&str]) -> bool {
        self.ended && tags.iter().any(|tag| tag.len() > self.rest().len() && tag.starts_with(self.rest()))
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
        let partial = rest.rfind('<').filter(|&i| self.begins(self.at + i, tag) == Next::Maybe);
        Seek::Pending(self.at + partial.unwrap_or(rest.len()))
    }
}

/// Tells whether one of the answers is yes, or may become yes.
pub fn any(answers: impl IntoIterator<Item = Next>) -> Next {
    let mut best = Next::No;
    for answer in answers {
        match answer {
            Next::Yes => return Next::Yes,
            Next::Maybe => best = Next::Maybe,
            Next::No => {}
        }
    }
    best
}
