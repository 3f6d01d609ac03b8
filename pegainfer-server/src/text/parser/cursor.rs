//! Text that is not accounted for yet, and how far a parser has looked into it.

/// White space of JSON and of the templates.
pub const WHITESPACE: [char; 4] = [' ', '\n', '\r', '\t'];

/// White space between two tags that belong together is shorter. Looking further would cost time again with every token.
const MAX_GAP: usize = 64;

/// Whether some expected text is next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    Yes,
    No,
    /// The text ends before that is certain.
    Maybe,
}

/// Where a tag is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seek {
    /// It begins at this byte.
    Found(usize),
    /// It is nowhere before this byte, where the text ends or may be the beginning of the tag.
    Pending(usize),
}

impl Seek {
    /// The byte before which it certainly is not.
    pub fn at(self) -> usize {
        match self {
            Self::Found(at) | Self::Pending(at) => at,
        }
    }
}

/// Text in, text out, with a position in between. Positions are bytes.
#[derive(Debug, Default)]
pub struct Cursor {
    pub text: String,
    /// Everything before was looked at.
    pub at: usize,
}

impl Cursor {
    /// Removes and gives the text before the position.
    pub fn take(&mut self) -> String {
        let rest = self.text.split_off(self.at);
        self.at = 0;
        std::mem::replace(&mut self.text, rest)
    }

    /// Removes and gives the text before `end`, but for `held` characters at its end. The position moves behind them, so
    /// that they are not looked at again: before the position there are only `held` characters, now and on return.
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

    /// Moves over white space.
    pub fn skip_whitespace(&mut self) {
        self.at = self.text.len() - self.rest().trim_start_matches(WHITESPACE).len();
    }

    /// Whether `expected` is next. The position may be inside a character.
    pub fn next_is(&self, expected: &str) -> Next {
        begins(&self.text.as_bytes()[self.at..], expected)
    }

    /// Moves over `expected` if it is next.
    pub fn eat(&mut self, expected: &str) -> Next {
        let next = self.next_is(expected);
        if next == Next::Yes {
            self.at += expected.len();
        }
        next
    }

    /// Looks for `tag`, which has a `<` at its beginning and nowhere else, from the position on.
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

/// Whether `expected` is in `text` after some white space.
pub fn begins_after_space(text: &str, expected: &str) -> Next {
    let inside = text.trim_start_matches(WHITESPACE);
    if text.len() - inside.len() > MAX_GAP { Next::No } else { begins(inside.as_bytes(), expected) }
}
