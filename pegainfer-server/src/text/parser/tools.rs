//! Content and tool calls: finds the calls and passes what is inside them to the parser of the format.

use super::cursor::{Cursor, Seek, WHITESPACE};
use super::dsml::DsmlParser;
use super::format::{CallPrefix, Progress, ToolFormat};
use super::hermes::HermesParser;
use super::output::Output;
use super::qwen3_coder::Qwen3CoderParser;
use serde_json::Value;
use std::sync::Arc;

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
    pub fn new(format: ToolFormat, prefix: CallPrefix, definitions: Arc<[Value]>) -> Self {
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
