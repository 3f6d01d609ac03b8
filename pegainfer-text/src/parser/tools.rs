//! Content and tool calls: finds the calls and passes their text to the parser of the format.

use super::call_start::{CallSearch, CallStart, Found, Inside, inside};
use super::cursor::{Cursor, WHITESPACE};
use super::dsml::DsmlParser;
use super::format::{CallPrefix, Progress, ToolFormat};
use super::hermes::HermesParser;
use super::output::EventCollector;
use super::qwen3_coder::Qwen3CoderParser;

#[derive(Debug)]
enum CallParser {
    /// After `<tool_call>`, before the form of the call is known.
    Tag,
    Hermes(HermesParser),
    /// JSON without a tag, and the text since it began.
    Json(HermesParser, String),
    Qwen3Coder(Qwen3CoderParser),
    Dsml(DsmlParser),
}

/// Splits calls from content. White space next to calls belongs to neither.
pub struct ToolParser {
    cursor: Cursor,
    search: CallSearch,
    /// The parser of the call at the position.
    call: Option<CallParser>,
    /// True if the prompt began the call at the position.
    forced: bool,
    after_call: bool,
}

impl ToolParser {
    /// A parser at the start of the output.
    pub fn new(search: CallSearch, prefix: CallPrefix) -> Self {
        let forced = prefix != CallPrefix::None;
        let definitions = search.definitions.clone();
        let call = forced.then(|| match search.format {
            ToolFormat::Hermes => CallParser::Hermes(HermesParser::new(prefix)),
            ToolFormat::Qwen3Coder => CallParser::Qwen3Coder(Qwen3CoderParser::new(prefix, definitions)),
            ToolFormat::Dsml => CallParser::Dsml(DsmlParser::new(prefix, definitions)),
        });
        Self { cursor: Cursor::default(), search, call, forced, after_call: false }
    }

    /// A parser that continues the text of another parser from byte `at`.
    pub fn continuing(search: CallSearch, cursor: &Cursor, at: usize) -> Self {
        Self { cursor: Cursor::continuing(cursor, at), ..Self::new(search, CallPrefix::None) }
    }

    /// Number of bytes that are held back.
    pub fn held(&self) -> usize {
        self.cursor.text.len()
    }

    /// Parses more text.
    pub fn push(&mut self, text: &str, out: &mut EventCollector) {
        self.cursor.text.push_str(text);
        if let Some(CallParser::Json(_, read)) = &mut self.call {
            read.push_str(text);
        }
        while if self.call.is_some() { self.call(out) } else { self.before_call(out) } {}
    }

    /// Ends the text: emits the text that was held back.
    pub fn finish(&mut self, out: &mut EventCollector) {
        self.cursor.ended = true;
        self.push("", out);
        if let Some(CallParser::Json(_, read)) = &mut self.call {
            // Its closing tag is missing.
            self.cursor.text = std::mem::take(read);
            self.call = None;
            out.reject_trial();
        }
        let called = match &mut self.call {
            None | Some(CallParser::Tag | CallParser::Json(..)) => false,
            Some(CallParser::Hermes(parser)) => parser.finish(out),
            Some(CallParser::Qwen3Coder(parser)) => parser.finish(&self.cursor, out),
            Some(CallParser::Dsml(parser)) => parser.finish(&self.cursor, out),
        };
        // A forced call that is cut off before it begins is dropped.
        let dropped = called || (self.forced && self.call.is_some());
        self.cursor.at = self.cursor.text.len();
        let text = self.cursor.take();
        self.content(if dropped { "" } else { &text }, out);
    }

    /// Emits content up to the next call; true if a call begins.
    fn before_call(&mut self, out: &mut EventCollector) -> bool {
        let found = self.search.find(&self.cursor);
        let (Found::At(end, _) | Found::NotBefore(end)) = found;
        let text = self.cursor.take_but(end, &WHITESPACE);
        self.content(&text, out);
        let Found::At(_, start) = found else { return false };
        let definitions = || self.search.definitions.clone();
        self.call = Some(match (start, self.search.format) {
            (CallStart::Tag(length), format) => {
                // The tag stays in the text until the call is certain.
                self.cursor.at += length;
                match format {
                    ToolFormat::Dsml => CallParser::Dsml(DsmlParser::new(CallPrefix::None, definitions())),
                    ToolFormat::Hermes | ToolFormat::Qwen3Coder => CallParser::Tag,
                }
            }
            (CallStart::Bare, ToolFormat::Dsml) => CallParser::Dsml(DsmlParser::new(CallPrefix::None, definitions())),
            (CallStart::Bare, _) => CallParser::Qwen3Coder(Qwen3CoderParser::bare(definitions())),
            (CallStart::BareJson, _) => {
                out.begin_trial();
                CallParser::Json(HermesParser::bare(), self.cursor.text.clone())
            }
        });
        true
    }

    /// Parses within a call; false if more text is needed.
    fn call(&mut self, out: &mut EventCollector) -> bool {
        let progress = match &mut self.call {
            None => return true,
            Some(CallParser::Tag) => return self.choose(out),
            Some(CallParser::Hermes(parser)) => parser.parse(&mut self.cursor, out),
            Some(CallParser::Qwen3Coder(parser)) => parser.parse(&mut self.cursor, out),
            Some(CallParser::Dsml(parser)) => parser.parse(&mut self.cursor, out),
            Some(CallParser::Json(parser, read)) => {
                let progress = parser.parse(&mut self.cursor, out);
                match progress {
                    Progress::More => {}
                    Progress::Done => out.accept_trial(),
                    Progress::NotACall => {
                        let rest = self.cursor.text.len() - self.cursor.at;
                        self.cursor.text = std::mem::take(read);
                        self.cursor.at = self.cursor.text.len() - rest;
                        out.reject_trial();
                    }
                }
                progress
            }
        };
        match progress {
            Progress::More => return false,
            Progress::Done => {
                self.cursor.take();
                self.after_call = true;
            }
            Progress::NotACall => self.not_a_call(out),
        }
        (self.call, self.forced) = (None, false);
        true
    }

    /// Chooses the parser of the text inside `<tool_call>`.
    fn choose(&mut self, out: &mut EventCollector) -> bool {
        self.call = match inside(&self.cursor) {
            Inside::Unknown => return false,
            Inside::Json => Some(CallParser::Hermes(HermesParser::new(CallPrefix::AnyFunction))),
            Inside::Function => {
                let definitions = self.search.definitions.clone();
                Some(CallParser::Qwen3Coder(Qwen3CoderParser::new(CallPrefix::None, definitions)))
            }
            Inside::Neither => {
                self.not_a_call(out);
                None
            }
        };
        true
    }

    /// Marks everything before the position as content.
    fn not_a_call(&mut self, out: &mut EventCollector) {
        let text = self.cursor.take();
        self.content(&text, out);
    }

    fn content(&mut self, text: &str, out: &mut EventCollector) {
        let text = if self.after_call { text.trim_start_matches(WHITESPACE) } else { text };
        self.after_call &= text.is_empty();
        out.content(text);
    }
}
