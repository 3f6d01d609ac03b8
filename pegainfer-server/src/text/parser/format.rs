//! The formats of tool calls: what the parser of each one and what finds the calls have in common.

use serde_json::Value;

/// Opening tag of a call, in Qwen's formats.
pub const CALL_OPEN: &str = "<tool_call>";
/// Closing tag of a call.
pub const CALL_CLOSE: &str = "</tool_call>";
/// Opening tag of a block of calls, in DeepSeek-V4's format.
pub const DSML_OPEN: &str = "<｜DSML｜tool_calls>";
/// Opening tag of a call in such a block, up to its name.
pub const DSML_INVOKE: &str = "<｜DSML｜invoke name=\"";

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

impl ToolFormat {
    /// Opening tag of a call, or of a block of calls.
    pub fn open(self) -> &'static str {
        match self {
            Self::Hermes | Self::Qwen3Coder => CALL_OPEN,
            Self::Dsml => DSML_OPEN,
        }
    }
}

/// Beginning of the first call that the prompt already contains, which forces the model to make the call.
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
    /// The text at the end of the prompt. It ends where a token of the model's own output would end, that is without the
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
    /// The call is complete; what follows the position is not part of it.
    Done,
    /// This is not a call: everything before the position is content.
    NotACall,
}
