//! The formats of tool calls: definitions shared by their parsers and the search for calls.

use super::cursor::Cursor;
use serde_json::Value;

/// Opening tag of a call, in Qwen's formats.
pub const CALL_OPEN: &str = "<tool_call>";
/// Closing tag of a call.
pub const CALL_CLOSE: &str = "</tool_call>";
/// Beginning of the opening tag of a function, before its name.
pub const FUNCTION: &str = "<function=";
/// Closing tag of a function.
pub const FUNCTION_CLOSE: &str = "</function>";
/// Beginning of the opening tag of a parameter.
pub const PARAMETER: &str = "<parameter=";
/// Closing tag of a parameter.
pub const PARAMETER_CLOSE: &str = "</parameter>";
/// Opening tag of a block of calls, in DeepSeek-V4's format.
pub const DSML_OPEN: &str = "<｜DSML｜tool_calls>";
/// Opening tag of a call in such a block, up to its name.
pub const DSML_INVOKE: &str = "<｜DSML｜invoke name=\"";
/// Maximum length of names and keys in bytes; longer text is not a tag.
pub const MAX_NAME: usize = 256;

/// Format in which a model writes tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolFormat {
    /// Qwen3: `<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>`.
    Hermes,
    /// Qwen3.5: `<tool_call>\n<function=…>\n<parameter=…>\n…\n</parameter>\n</function>\n</tool_call>`.
    Qwen3Coder,
    /// DeepSeek-V4: a block of invocations, see [`super::dsml`].
    Dsml,
}

/// Beginning of the first call that the prompt already contains, to force the call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallPrefix {
    /// Nothing: the model decides.
    None,
    /// The beginning of a call to any function.
    AnyFunction,
    /// The beginning of a call to this function.
    Function(String),
}

impl CallPrefix {
    /// The text at the end of the prompt. It ends where a token of the model's own output would end, so without the
    /// space before the arguments.
    pub fn text(&self, format: ToolFormat) -> String {
        match (self, format) {
            (Self::None, _) => String::new(),
            (Self::AnyFunction, ToolFormat::Hermes) => format!("{CALL_OPEN}\n"),
            (Self::AnyFunction, ToolFormat::Qwen3Coder) => format!("{CALL_OPEN}\n<function="),
            (Self::Function(name), ToolFormat::Hermes) => {
                format!("{CALL_OPEN}\n{{\"name\": {}, \"arguments\":", Value::from(name.as_str()))
            }
            (Self::Function(name), ToolFormat::Qwen3Coder) => format!("{CALL_OPEN}\n<function={name}>\n"),
            (Self::AnyFunction, ToolFormat::Dsml) => format!("\n\n{}\n{}", DSML_OPEN, DSML_INVOKE),
            (Self::Function(name), ToolFormat::Dsml) => format!("\n\n{}\n{}{name}\">\n", DSML_OPEN, DSML_INVOKE),
        }
    }
}

/// Progress of a parser within a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// More text is needed.
    More,
    /// The call is complete. The text after the position is not part of it.
    Done,
    /// This is not a call: everything before the position is content.
    NotACall,
}

/// A name in a tag, up to the text that ends it.
#[derive(Debug, PartialEq, Eq)]
pub enum TagName {
    /// The name, and the byte after the text that ends it.
    Complete(String, usize),
    /// The text ends inside the name.
    Incomplete,
    Bad,
}

/// Reads a name from this byte up to `end`, which is `>` or `"`.
pub fn tag_name(cursor: &Cursor, at: usize, end: char) -> TagName {
    let rest = &cursor.text[at..];
    match rest.find([end, '>', '<', '\n']) {
        Some(length) if rest[length..].starts_with(end) && length <= MAX_NAME && !rest[..length].trim().is_empty() => {
            TagName::Complete(rest[..length].trim().to_owned(), at + length + 1)
        }
        None if rest.len() <= MAX_NAME => TagName::Incomplete,
        _ => TagName::Bad,
    }
}

/// The request's tools by name, in OpenAI's format.
pub fn definition<'a>(definitions: &'a [Value], function: &str) -> Option<&'a Value> {
    definitions.iter().map(|tool| &tool["function"]).find(|tool| tool["name"] == function)
}
