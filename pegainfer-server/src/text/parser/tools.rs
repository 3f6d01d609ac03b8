//! Content and tool calls: finds the calls, leaves what is inside them to the format's own reader.

use super::cursor::{Cursor, Seek, WHITESPACE};
use super::output::Output;
use super::{dsml, hermes, qwen3_coder};
use serde_json::Value;

/// Begins a call, in Qwen's formats.
pub const CALL_OPEN: &str = "<tool_call>";
/// Ends a call.
pub const CALL_CLOSE: &str = "</tool_call>";

/// How a model writes its calls.
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
    /// Begins a call, or a block of them.
    fn open(self) -> &'static str {
        match self {
            Self::Hermes | Self::Qwen3Coder => CALL_OPEN,
            Self::Dsml => dsml::OPEN,
        }
    }
}

/// What the prompt has of the first call already: that forces the model to make it.
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
    /// The text at the end of the prompt. It ends where a token of the model's own writing would end, so without
    /// the space before the arguments.
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

/// How far a reader has come with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// It takes more text.
    More,
    /// The call is complete; what follows the position is not part of it.
    Done,
    /// It is no call: everything before the position is content.
    NotACall,
}

#[derive(Debug)]
enum Reader {
    Hermes(hermes::Reader),
    Qwen3Coder(qwen3_coder::Reader),
    Dsml(dsml::Reader),
}

/// Splits calls from content. White space next to calls belongs to neither.
pub struct ToolParser {
    cursor: Cursor,
    /// Begins a call.
    open: &'static str,
    reader: Reader,
    in_call: bool,
    after_call: bool,
}

impl ToolParser {
    /// Nothing read yet. `definitions`: the request's tools in OpenAI's form.
    pub fn new(format: ToolFormat, prefix: CallPrefix, definitions: Vec<Value>) -> Self {
        let in_call = prefix != CallPrefix::None;
        let reader = match format {
            ToolFormat::Hermes => Reader::Hermes(hermes::Reader::new(prefix)),
            ToolFormat::Qwen3Coder => Reader::Qwen3Coder(qwen3_coder::Reader::new(prefix, definitions)),
            ToolFormat::Dsml => Reader::Dsml(dsml::Reader::new(prefix)),
        };
        Self { cursor: Cursor::default(), open: format.open(), reader, in_call, after_call: false }
    }

    /// Takes a piece of text.
    pub fn push(&mut self, piece: &str, out: &mut Output) {
        self.cursor.text.push_str(piece);
        loop {
            let goes_on = if self.in_call { self.call(out) } else { self.before_call(out) };
            if !goes_on {
                return;
            }
        }
    }

    /// Gives out what is left, when no more text follows.
    pub fn finish(&mut self, out: &mut Output) {
        self.cursor.at = self.cursor.text.len();
        let began = self.in_call
            && match &mut self.reader {
                Reader::Hermes(reader) => reader.finish(&self.cursor.text, out),
                Reader::Qwen3Coder(reader) => reader.finish(&self.cursor.text, out),
                Reader::Dsml(reader) => reader.finish(&self.cursor.text, out),
            };
        if !began {
            let text = self.cursor.take();
            self.content(&text, out);
        }
    }

    /// Gives out content up to the next call; true when there is one.
    fn before_call(&mut self, out: &mut Output) -> bool {
        let tag = self.cursor.seek(self.open);
        let text = self.cursor.take_but(tag.at(), &WHITESPACE);
        self.content(&text, out);
        if matches!(tag, Seek::Pending(_)) {
            return false;
        }
        // The tag stays in the text until this is certain to be a call.
        self.cursor.at += self.open.len();
        match &mut self.reader {
            Reader::Hermes(reader) => reader.begin(),
            Reader::Qwen3Coder(reader) => reader.begin(),
            Reader::Dsml(reader) => reader.begin(),
        }
        self.in_call = true;
        true
    }

    /// Reads on in a call; false when that takes more text.
    fn call(&mut self, out: &mut Output) -> bool {
        let progress = match &mut self.reader {
            Reader::Hermes(reader) => reader.read(&mut self.cursor, out),
            Reader::Qwen3Coder(reader) => reader.read(&mut self.cursor, out),
            Reader::Dsml(reader) => reader.read(&mut self.cursor, out),
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
