//! DeepSeek-V4's tags, and the end of a value between them.

use super::cursor::{Cursor, Next, any};
use super::format::{DSML_INVOKE, TagName, definition, tag_name};
use super::value_end::ValueEnd;
use serde_json::Value;

/// Closing tag of an invocation.
pub const INVOKE_CLOSE: &str = "</｜DSML｜invoke>";
/// Opening tag of a parameter, up to its name.
pub const PARAMETER: &str = "<｜DSML｜parameter name=\"";
/// Closing tag of a parameter.
pub const PARAMETER_CLOSE: &str = "</｜DSML｜parameter>";
const TAG: &str = "<｜DSML｜";
const CLOSING_TAG: &str = "</｜DSML｜";
/// Maximum length of the outer tag's name in bytes.
const MAX_OUTER: usize = 32;

/// Tells whether an outer tag closes at byte `at`, and returns the byte after it. Models confuse its names.
pub fn outer_close(cursor: &Cursor, at: usize) -> (Next, usize) {
    outer(cursor, at, CLOSING_TAG)
}

/// Tells whether an outer tag opens at byte `at`, and returns the byte after it.
pub fn outer_open(cursor: &Cursor, at: usize) -> (Next, usize) {
    outer(cursor, at, TAG)
}

fn outer(cursor: &Cursor, at: usize, begin: &str) -> (Next, usize) {
    match cursor.begins(at, begin) {
        Next::Yes => {}
        other => return (other, at),
    }
    let name = &cursor.text[at + begin.len()..];
    let length = name.find(|c: char| !c.is_ascii_alphabetic() && c != '_').unwrap_or(name.len());
    let end = at + begin.len() + length;
    match cursor.text[end..].chars().next() {
        _ if length > MAX_OUTER => (Next::No, at),
        // A longer name may begin like an inner tag's.
        None => (cursor.maybe(), at),
        Some(_) if ["invoke", "parameter"].contains(&&name[..length]) => (Next::No, at),
        Some('>') if length > 0 => (Next::Yes, end + 1),
        Some(_) => (Next::No, at),
    }
}

/// Searches for the end of one value. Values are not escaped, and models both omit closing tags and write values that
/// contain tags. A closing tag ends the value if its line or the output ends there, or if another tag follows, unless
/// it closes an opening tag in the value. An opening tag ends the value if it names a parameter of the tool.
pub struct ValueSearch<'a> {
    pub cursor: &'a Cursor,
    pub definitions: &'a [Value],
    /// The parameters of the function; empty if unknown.
    pub keys: &'a [&'a str],
    /// True if a parameter has been written already.
    pub given: &'a dyn Fn(&str) -> bool,
    /// True if the value is text; other values contain no opening tags.
    pub is_text: bool,
}

impl ValueSearch<'_> {
    /// Finds the end of the value. Also returns the number of opening tags in the value that are not closed in it,
    /// counting the `nested` ones before this text.
    pub fn run(&self, mut nested: usize) -> (ValueEnd, usize) {
        let text = &self.cursor.text;
        for (at, _) in text.match_indices('<') {
            match self.cursor.begins(at, PARAMETER_CLOSE) {
                Next::Yes => match self.is_followed(at + PARAMETER_CLOSE.len(), nested) {
                    Next::Yes => return (ValueEnd::At(at, PARAMETER_CLOSE.len()), nested),
                    Next::Maybe => return (ValueEnd::After(at), nested),
                    Next::No => {
                        nested = nested.saturating_sub(1);
                        continue;
                    }
                },
                Next::Maybe => return (ValueEnd::After(at), nested),
                Next::No => {}
            }
            match any([self.parameter(at), self.end_of_invocation(at), self.end_of_block(at)]) {
                Next::Yes => return (ValueEnd::At(at, 0), nested),
                Next::Maybe => return (ValueEnd::After(at), nested),
                Next::No => nested += usize::from(self.cursor.begins(at, PARAMETER) == Next::Yes),
            }
        }
        (ValueEnd::After(text.len()), nested)
    }

    /// Tells whether the text after a closing tag shows that it closes the value.
    fn is_followed(&self, at: usize, nested: usize) -> Next {
        let blanks = self.cursor.text[at..].trim_start_matches([' ', '\t']);
        let line_ends = match blanks.chars().next() {
            None => {
                if self.cursor.ended {
                    Next::Yes
                } else {
                    Next::Maybe
                }
            }
            Some('\n' | '\r') if nested == 0 => Next::Yes,
            Some(_) => Next::No,
        };
        let Some(next) = self.cursor.after_space(at) else { return line_ends };
        let again = if nested == 0 { self.cursor.begins(next, PARAMETER_CLOSE) } else { Next::No };
        let tag = self.cursor.any_after_space(at, &[PARAMETER, INVOKE_CLOSE, DSML_INVOKE]);
        any([line_ends, again, tag, outer_close(self.cursor, next).0])
    }

    /// Tells whether this opens the next parameter, because the value's closing tag is missing.
    fn parameter(&self, at: usize) -> Next {
        match self.cursor.begins(at, PARAMETER) {
            Next::Yes => match tag_name(self.cursor, at + PARAMETER.len(), '"') {
                TagName::Incomplete => self.cursor.maybe(),
                TagName::Complete(..) if !self.is_text => Next::Yes,
                TagName::Complete(key, _) if (self.given)(&key) => Next::No,
                TagName::Complete(key, _) if self.keys.contains(&key.as_str()) => Next::Yes,
                TagName::Complete(..) if self.keys.is_empty() && self.cursor.is_line_start(at) => Next::Yes,
                TagName::Complete(..) | TagName::Bad => Next::No,
            },
            other => other,
        }
    }

    /// Tells whether the invocation ends here.
    fn end_of_invocation(&self, at: usize) -> Next {
        match self.cursor.begins(at, INVOKE_CLOSE) {
            Next::Yes => {
                let after = at + INVOKE_CLOSE.len();
                let Some(next) = self.cursor.after_space(after) else { return Next::No };
                any([
                    self.cursor.ends_after_space(after),
                    self.cursor.any_after_space(after, &[DSML_INVOKE]),
                    outer_close(self.cursor, next).0,
                ])
            }
            other => other,
        }
    }

    /// Tells whether the block ends here, or another invocation of a tool begins.
    fn end_of_block(&self, at: usize) -> Next {
        let closes = match outer_close(self.cursor, at) {
            (Next::Yes, after) => self.cursor.ends_after_space(after),
            (other, _) => other,
        };
        if !self.cursor.is_line_start(at) {
            return closes;
        }
        let opens = match self.cursor.begins(at, DSML_INVOKE) {
            Next::Yes => match tag_name(self.cursor, at + DSML_INVOKE.len(), '"') {
                TagName::Complete(name, _) if definition(self.definitions, &name).is_some() => Next::Yes,
                TagName::Incomplete => self.cursor.maybe(),
                TagName::Complete(..) | TagName::Bad => Next::No,
            },
            other => other,
        };
        any([closes, opens])
    }
}

/// A value cut off by the end of the output, without a partial tag and the line break before it.
pub fn without_partial_tag(text: &str) -> &str {
    let is_partial = |&at: &usize| {
        let tag = &text[at..];
        (tag.starts_with(TAG) || tag.starts_with(CLOSING_TAG)) && !tag.contains('>')
            || [TAG, CLOSING_TAG].iter().any(|other| other.starts_with(tag))
    };
    let text = &text[..text.rfind('<').filter(is_partial).unwrap_or(text.len())];
    text.strip_suffix('\n').unwrap_or(text)
}

/// True if the output ends at the position, or inside a tag that begins there.
pub fn is_cut_off(cursor: &Cursor) -> bool {
    cursor.ended && without_partial_tag(cursor.rest()).is_empty()
}
