//! The value of one parameter of a Qwen3.5 call: text up to a tag, emitted as JSON.

use super::cursor::{Cursor, Next, begins, begins_after_space};
use super::format::CALL_CLOSE;
use super::output::Output;
use super::typed::ParameterType;
use serde_json::Value;

/// Beginning of the opening tag of a parameter.
pub const PARAMETER: &str = "<parameter=";
/// Closing tag of a parameter.
pub const PARAMETER_CLOSE: &str = "</parameter>";
/// Closing tag of a function.
pub const FUNCTION_CLOSE: &str = "</function>";

/// A value that is being parsed. One line break at its beginning and one at its end are not part of it.
#[derive(Debug)]
pub struct Parameter {
    kind: ParameterType,
    /// The value so far, if it is emitted as a whole.
    text: String,
    /// Whether the leading line break has not been read yet.
    opening: bool,
    /// Whether nothing of the value has been read yet.
    fresh: bool,
}

impl Parameter {
    /// Starts a value. Emits the opening quote of a string.
    pub fn open(kind: ParameterType, out: &mut Output) -> Self {
        out.tool_arguments(if kind.is_text() { "\"" } else { "" });
        Self { kind, text: String::new(), opening: true, fresh: true }
    }

    /// Parses as far as the text goes; true at the end of the value.
    pub fn read(&mut self, cursor: &mut Cursor, out: &mut Output) -> bool {
        if self.opening {
            let Some(byte) = cursor.peek() else { return false };
            cursor.at = usize::from(byte == b'\n');
            cursor.take();
            self.opening = false;
        }
        let (end, tag) = match value_end(&cursor.text, self.fresh) {
            ValueEnd::At(end, tag) => (end, Some(tag)),
            ValueEnd::After(end) => (end, None),
        };
        // A line break is held back until it is known whether it is the last one.
        let text = &cursor.text[..end];
        let text = text.strip_suffix('\n').unwrap_or(text);
        self.emit(text, out);
        self.fresh &= text.is_empty();
        cursor.at = tag.map_or(text.len(), |tag| end + tag);
        cursor.take();
        if tag.is_some() {
            self.close(out);
        }
        tag.is_some()
    }

    /// Ends the text with the held-back rest `held`: a cut-off value is emitted as far as it goes. True if the value and its
    /// function are complete.
    pub fn finish(&mut self, held: &str, out: &mut Output) -> bool {
        let ended = held.trim_start_matches('\n').starts_with(FUNCTION_CLOSE);
        if ended {
            self.close(out);
        } else {
            self.emit(held, out);
            out.tool_arguments(&if self.text.is_empty() { String::new() } else { self.kind.json(&self.text) });
        }
        ended
    }

    fn emit(&mut self, text: &str, out: &mut Output) {
        if self.kind.is_text() {
            let quoted = Value::from(text).to_string();
            out.tool_arguments(&quoted[1..quoted.len() - 1]);
        } else {
            self.text.push_str(text);
        }
    }

    fn close(&self, out: &mut Output) {
        out.tool_arguments(&if self.kind.is_text() { "\"".into() } else { self.kind.json(&self.text) });
    }
}

enum ValueEnd {
    /// The value ends at this byte, before a tag of this many bytes (0: the tag does not belong to the value).
    At(usize, usize),
    /// The value extends at least to this byte.
    After(usize),
}

/// Searches for the end of a value in `text`. `fresh`: the value begins with this text.
fn value_end(text: &str, fresh: bool) -> ValueEnd {
    for (at, _) in text.match_indices('<') {
        let rest = &text[at..];
        let line_start = text[..at].ends_with('\n') || (fresh && at == 0);
        let next_parameter = if line_start { begins(rest.as_bytes(), PARAMETER) } else { Next::No };
        match (begins(rest.as_bytes(), PARAMETER_CLOSE), next_parameter, function_end(rest)) {
            (Next::Yes, ..) => return ValueEnd::At(at, PARAMETER_CLOSE.len()),
            (_, Next::Yes, _) | (.., Next::Yes) => return ValueEnd::At(at, 0),
            (Next::No, Next::No, Next::No) => {}
            _ => return ValueEnd::After(at),
        }
    }
    ValueEnd::After(text.len())
}

/// `</function>` may be part of a value: it ends the function only before `</tool_call>`.
fn function_end(text: &str) -> Next {
    match begins(text.as_bytes(), FUNCTION_CLOSE) {
        Next::Yes => begins_after_space(&text[FUNCTION_CLOSE.len()..], CALL_CLOSE),
        other => other,
    }
}
