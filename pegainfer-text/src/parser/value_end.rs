//! The end of a value that a model writes between Qwen3.5's tags.
//!
//! The format has no escapes, and models both omit closing tags and write values that contain the tags. A closing tag
//! in the middle of a line ends the value only if another tag of the format follows. A closing tag at the start of a
//! line always ends it, unless the value contains its opening tag. An opening tag ends the value only if it names a
//! parameter of the tool.

use super::cursor::{Cursor, Next, any};
use super::format::{
    CALL_CLOSE, CALL_OPEN, FUNCTION, FUNCTION_CLOSE, PARAMETER, PARAMETER_CLOSE, TagName, definition, tag_name,
};
use serde_json::Value;

/// Tags that may follow a value.
const TAGS: [&str; 4] = [PARAMETER, PARAMETER_CLOSE, FUNCTION_CLOSE, CALL_CLOSE];

/// The end of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueEnd {
    /// The value ends at this byte, before a tag of this many bytes (0: the tag does not belong to the value).
    At(usize, usize),
    /// The value extends at least to this byte.
    After(usize),
}

/// The parameters of a function from its schema; empty if unknown.
pub fn known_keys<'a>(definitions: &'a [Value], function: &str) -> Vec<&'a str> {
    let properties =
        definition(definitions, function).and_then(|function| function["parameters"]["properties"].as_object());
    properties.into_iter().flatten().map(|(key, _)| key.as_str()).collect()
}

/// Searches for the end of one value.
pub struct EndSearch<'a> {
    pub cursor: &'a Cursor,
    /// The parameters of the function; empty if unknown.
    pub keys: &'a [&'a str],
    /// True if a parameter has been written already.
    pub given: &'a dyn Fn(&str) -> bool,
    /// True if the value is text; other values contain no opening tags.
    pub is_text: bool,
    /// True if the value begins at the start of the cursor's text.
    pub fresh: bool,
}

impl EndSearch<'_> {
    /// Finds the end of the value. Also returns the number of opening tags in the value that are not closed in it,
    /// counting the `nested` ones before this text.
    pub fn run(&self, mut nested: usize) -> (ValueEnd, usize) {
        let text = &self.cursor.text;
        for (at, _) in text.match_indices('<') {
            let line_start = text[..at].ends_with('\n') || (self.fresh && at == 0);
            match self.closing_parameter(at, line_start, nested) {
                Next::Yes => return (ValueEnd::At(at, PARAMETER_CLOSE.len()), nested),
                Next::Maybe => return (ValueEnd::After(at), nested),
                Next::No => {}
            }
            if self.cursor.begins(at, PARAMETER_CLOSE) == Next::Yes {
                nested = nested.saturating_sub(1);
                continue;
            }
            match any([self.opening_parameter(at, line_start), self.end_of_function(at, line_start)]) {
                Next::Yes => return (ValueEnd::At(at, 0), nested),
                Next::Maybe => return (ValueEnd::After(at), nested),
                Next::No => nested += usize::from(self.key_at(at).is_some()),
            }
        }
        (ValueEnd::After(text.len()), nested)
    }

    /// Tells whether this is the closing tag of the value.
    fn closing_parameter(&self, at: usize, line_start: bool, nested: usize) -> Next {
        match self.cursor.begins(at, PARAMETER_CLOSE) {
            Next::Yes if line_start && nested == 0 => Next::Yes,
            Next::Yes => self.is_followed(at + PARAMETER_CLOSE.len()),
            other => other,
        }
    }

    /// Tells whether a tag that may come after a parameter follows, or the end of the output.
    fn is_followed(&self, at: usize) -> Next {
        let Some(next) = self.cursor.after_space(at) else { return Next::No };
        let rest = &self.cursor.text[next..];
        if self.cursor.ended && TAGS.iter().any(|tag| tag.starts_with(rest)) {
            return Next::Yes;
        }
        let parameter = match self.cursor.begins(next, PARAMETER) {
            Next::Yes => match tag_name(self.cursor, next + PARAMETER.len(), '>') {
                TagName::Complete(key, _) if self.is_known(&key) => Next::Yes,
                TagName::Incomplete if self.cursor.ended => Next::Yes,
                TagName::Incomplete => Next::Maybe,
                TagName::Complete(..) | TagName::Bad => Next::No,
            },
            other => other,
        };
        any([parameter, self.cursor.any_after_space(at, &[FUNCTION_CLOSE, CALL_CLOSE])])
    }

    /// Tells whether this opens the next parameter, because the value's closing tag is missing.
    fn opening_parameter(&self, at: usize, line_start: bool) -> Next {
        match self.cursor.begins(at, PARAMETER) {
            Next::Yes => match tag_name(self.cursor, at + PARAMETER.len(), '>') {
                TagName::Incomplete => self.cursor.maybe(),
                TagName::Complete(..) if line_start && !self.is_text => Next::Yes,
                TagName::Complete(key, _) if line_start && self.is_known(&key) && !(self.given)(&key) => Next::Yes,
                TagName::Complete(..) | TagName::Bad => Next::No,
            },
            other => other,
        }
    }

    /// Tells whether the function or the call ends here, because the value's closing tag is missing.
    fn end_of_function(&self, at: usize, line_start: bool) -> Next {
        let next_call: &[&str] = if line_start { &[CALL_OPEN, FUNCTION] } else { &[] };
        let ends = |tag: &str, followers: &[&str]| match self.cursor.begins(at, tag) {
            Next::Yes => {
                let after = at + tag.len();
                any([
                    self.cursor.any_after_space(after, followers),
                    self.cursor.any_after_space(after, next_call),
                    self.cursor.ends_after_space(after),
                ])
            }
            other => other,
        };
        any([ends(FUNCTION_CLOSE, &[CALL_CLOSE]), ends(CALL_CLOSE, &[])])
    }

    fn is_known(&self, key: &str) -> bool {
        self.keys.is_empty() || self.keys.contains(&key)
    }

    /// The name of the parameter that a tag at this byte opens.
    fn key_at(&self, at: usize) -> Option<String> {
        match self.cursor.begins(at, PARAMETER) {
            Next::Yes => match tag_name(self.cursor, at + PARAMETER.len(), '>') {
                TagName::Complete(key, _) if !key.contains(char::is_whitespace) => Some(key),
                _ => None,
            },
            _ => None,
        }
    }
}

/// A value cut off by the end of the output, without a partial tag and the line break before it.
pub fn without_partial_tag(text: &str) -> &str {
    let is_partial = |&at: &usize| {
        let tag = &text[at..];
        let opens_parameter = tag.starts_with(PARAMETER) && !tag.contains('>') && text[..at].ends_with('\n');
        opens_parameter || TAGS.iter().any(|other| other.starts_with(tag))
    };
    let text = &text[..text.rfind('<').filter(is_partial).unwrap_or(text.len())];
    text.strip_suffix('\n').unwrap_or(text)
}
