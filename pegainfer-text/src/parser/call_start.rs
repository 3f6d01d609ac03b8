//! Finds the beginning of calls: at their outer tags, or without them if a call is certain.

use super::cursor::{Cursor, Next, WHITESPACE, any};
use super::dsml_tags::{INVOKE_CLOSE, PARAMETER as DSML_PARAMETER, outer_open};
use super::format::{
    CALL_OPEN, DSML_INVOKE, FUNCTION, FUNCTION_CLOSE, PARAMETER, TagName, ToolFormat, definition, tag_name,
};
use serde_json::Value;
use std::sync::Arc;

/// How a call begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallStart {
    /// `<tool_call>`, or the outer tag of a block, of this many bytes.
    Tag(usize),
    /// A call of one of the tools without its outer tag.
    Bare,
    /// A call as JSON without its tag. It counts only if the closing tag follows.
    BareJson,
}

/// Result of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Something begins at this byte.
    At(usize, CallStart),
    /// Nothing begins before this byte, where the text ends or may contain a beginning.
    NotBefore(usize),
}

/// Searches for calls.
#[derive(Debug, Clone)]
pub struct CallSearch {
    pub format: ToolFormat,
    /// The request's tools, in OpenAI's format.
    pub definitions: Arc<[Value]>,
    /// True if calls may be JSON without a tag.
    pub bare_json: bool,
}

impl CallSearch {
    /// The first beginning from the position on.
    pub fn find(&self, cursor: &Cursor) -> Found {
        for (at, byte) in cursor.text.bytes().enumerate().skip(cursor.at) {
            let (next, start) = match byte {
                b'<' if self.format == ToolFormat::Dsml => self.dsml(cursor, at),
                b'<' => self.tag(cursor, at),
                b'{' if self.bare_json && self.format != ToolFormat::Dsml && cursor.is_line_start(at) => {
                    (self.json(cursor, at), CallStart::BareJson)
                }
                _ => continue,
            };
            match next {
                Next::Yes => return Found::At(at, start),
                Next::Maybe => return Found::NotBefore(at),
                Next::No => {}
            }
        }
        Found::NotBefore(cursor.text.len())
    }

    fn tag(&self, cursor: &Cursor, at: usize) -> (Next, CallStart) {
        let tag = cursor.begins(at, CALL_OPEN);
        if tag != Next::No || !cursor.is_line_start(at) {
            return (tag, CallStart::Tag(CALL_OPEN.len()));
        }
        let function = self.name(cursor, at, FUNCTION, ">", &[PARAMETER, FUNCTION_CLOSE]);
        (function, CallStart::Bare)
    }

    fn dsml(&self, cursor: &Cursor, at: usize) -> (Next, CallStart) {
        let (outer, end) = outer_open(cursor, at);
        if outer != Next::No || !cursor.is_line_start(at) {
            return (outer, CallStart::Tag(end - at));
        }
        let invoke = self.name(cursor, at, DSML_INVOKE, "\">", &[DSML_PARAMETER, INVOKE_CLOSE]);
        (invoke, CallStart::Bare)
    }

    /// Tells whether `open`, the name of a tool and `close` begin at byte `at`, followed by one of `followers` or the
    /// end of the output.
    fn name(&self, cursor: &Cursor, at: usize, open: &str, close: &str, followers: &[&str]) -> Next {
        match cursor.begins(at, open) {
            Next::Yes => {}
            other => return other,
        }
        let name = at + open.len();
        let end = match tag_name(cursor, name, if close == ">" { '>' } else { '"' }) {
            TagName::Complete(function, end) if definition(&self.definitions, &function).is_some() => end,
            TagName::Incomplete => return cursor.maybe(),
            TagName::Complete(..) | TagName::Bad => return Next::No,
        };
        match cursor.begins(end, &close[1..]) {
            Next::Yes => {}
            other => return other,
        }
        let after = end + close.len() - 1;
        any([
            cursor.any_after_space(after, followers),
            cursor.any_after_space(after, &["{"]),
            cursor.ends_after_space(after),
        ])
    }

    /// Tells whether an object that begins with the name of a tool comes at this byte.
    fn json(&self, cursor: &Cursor, at: usize) -> Next {
        let mut at = at + 1;
        for part in ["\"name\"", ":", "\""] {
            let Some(next) = cursor.after_space(at) else { return Next::No };
            match cursor.begins(next, part) {
                Next::Yes => at = next + part.len(),
                other => return other,
            }
        }
        match tag_name(cursor, at, '"') {
            TagName::Complete(name, _) if definition(&self.definitions, &name).is_some() => Next::Yes,
            TagName::Incomplete => cursor.maybe(),
            TagName::Complete(..) | TagName::Bad => Next::No,
        }
    }
}

/// Form of the text inside `<tool_call>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inside {
    Json,
    Function,
    Neither,
    Unknown,
}

/// The form of the call after an opening tag that ends at the position. Models confuse the two forms.
pub fn inside(cursor: &Cursor) -> Inside {
    let rest = cursor.rest().trim_start_matches(WHITESPACE);
    match rest.chars().next() {
        None if cursor.ended => Inside::Neither,
        None => Inside::Unknown,
        Some('{' | '[') => Inside::Json,
        Some(_) => match cursor.begins(cursor.text.len() - rest.len(), FUNCTION) {
            Next::Yes => Inside::Function,
            Next::Maybe => Inside::Unknown,
            Next::No => Inside::Neither,
        },
    }
}
