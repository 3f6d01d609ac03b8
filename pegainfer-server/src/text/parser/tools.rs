//! Content and tool calls: finds the calls and passes what is inside them to the parser of the format.

use super::cursor::{Cursor, Seek, WHITESPACE};
use super::dsml::{self, DsmlParser};
use super::hermes::HermesParser;
use super::output::Output;
use super::qwen3_coder::Qwen3CoderParser;
use serde_json::Value;

/// Opening tag of a call, in Qwen's formats.
pub const CALL_OPEN: &str = "<tool_call>";
/// Closing tag of a call.
pub const CALL_CLOSE: &str = "</tool_call>";

/// Format in which a model writes tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolFormat {
    /// Qwen3: `<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>`.
    Hermes,
    /// Qwen3.5: `<tool_call>\n<function=…>\n<parameter=…>\n…\n</parameter>\n</function>\n</tool_call>`.
    Qwen3Coder,
    /// DeepSeek-V4: a block of invocations, see [`dsml`].
    Dsml,
}

impl ToolFormat {
    /// Opening tag of a call, or of a block of calls.
    fn open(self) -> &'static str {
        match self {
            Self::Hermes | Self::Qwen3Coder => CALL_OPEN,
            Self::Dsml => dsml::OPEN,
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
            (Self::AnyFunction, ToolFormat::Dsml) => format!("\n\n{}\n{}", dsml::OPEN, dsml::INVOKE),
            (Self::Function(name), ToolFormat::Dsml) => format!("\n\n{}\n{}{name}\">\n", dsml::OPEN, dsml::INVOKE),
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

#[derive(Debug)]
enum CallParser {
    Hermes(HermesParser),
    Qwen3Coder(Qwen3CoderParser),
    Dsml(DsmlParser),
}

/// Splits calls from content. White space next to calls belongs to neither.
pub struct ToolParser {
    cursor: Cursor,
    /// Opening tag of a call.
    open: &'static str,
    call_parser: CallParser,
    in_call: bool,
    after_call: bool,
}

impl ToolParser {
    /// A parser that has not read anything. `definitions`: the request's tools in OpenAI's format.
    pub fn new(format: ToolFormat, prefix: CallPrefix, definitions: Vec<Value>) -> Self {
        let in_call = prefix != CallPrefix::None;
        let call_parser = match format {
            ToolFormat::Hermes => CallParser::Hermes(HermesParser::new(prefix)),
            ToolFormat::Qwen3Coder => CallParser::Qwen3Coder(Qwen3CoderParser::new(prefix, definitions)),
            ToolFormat::Dsml => CallParser::Dsml(DsmlParser::new(prefix)),
        };
        Self { cursor: Cursor::default(), open: format.open(), call_parser, in_call, after_call: false }
    }

    /// Parses more text.
    pub fn push(&mut self, text: &str, out: &mut Output) {
        self.cursor.text.push_str(text);
        loop {
            let continues = if self.in_call { self.call(out) } else { self.before_call(out) };
            if !continues {
                return;
            }
        }
    }

    /// Emits the held-back rest at the end of the text.
    pub fn finish(&mut self, out: &mut Output) {
        self.cursor.at = self.cursor.text.len();
        let began = self.in_call
            && match &mut self.call_parser {
                CallParser::Hermes(parser) => parser.finish(&self.cursor.text, out),
                CallParser::Qwen3Coder(parser) => parser.finish(&self.cursor.text, out),
                CallParser::Dsml(parser) => parser.finish(&self.cursor.text, out),
            };
        if !began {
            let text = self.cursor.take();
            self.content(&text, out);
        }
    }

    /// Emits content up to the next call; true if a call begins.
    fn before_call(&mut self, out: &mut Output) -> bool {
        let tag = self.cursor.seek(self.open);
        let text = self.cursor.take_but(tag.at(), &WHITESPACE);
        self.content(&text, out);
        if matches!(tag, Seek::Pending(_)) {
            return false;
        }
        // The tag stays in the text until this is certain to be a call.
        self.cursor.at += self.open.len();
        match &mut self.call_parser {
            CallParser::Hermes(parser) => parser.begin(),
            CallParser::Qwen3Coder(parser) => parser.begin(),
            CallParser::Dsml(parser) => parser.begin(),
        }
        self.in_call = true;
        true
    }

    /// Parses within a call; false if more text is needed.
    fn call(&mut self, out: &mut Output) -> bool {
        let progress = match &mut self.call_parser {
            CallParser::Hermes(parser) => parser.parse(&mut self.cursor, out),
            CallParser::Qwen3Coder(parser) => parser.parse(&mut self.cursor, out),
            CallParser::Dsml(parser) => parser.parse(&mut self.cursor, out),
        };
        match progress {
            Progress::More => return false,
            Progress::Done => {
                self.cursor.take();
                self.after_call = true;
            }
            Progress::NotACall => {
                let text = self.cursor.take();
                self.content(&text, out);
            }
        }
        self.in_call = false;
        true
    }

    fn content(&mut self, text: &str, out: &mut Output) {
        let text = if self.after_call { text.trim_start_matches(WHITESPACE) } else { text };
        self.after_call &= text.is_empty();
        out.content(text);
    }
}
