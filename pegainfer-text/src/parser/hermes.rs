//! Qwen3's (Hermes) tool calls: `{"name": …, "arguments": {…}}` between `<tool_call>` and `</tool_call>`.
//!
//! No event is emitted before a call is certain: its name is known and its arguments have begun. From then on the
//! arguments are streamed. If the name comes after the arguments, they are held back until the name is known. Several
//! objects in one tag, or a list of them, are several calls.

use super::arguments::{cut_off_object, stream_object};
use super::cursor::{Cursor, Next};
use super::format::{CALL_CLOSE, CallPrefix, Progress};
use super::json_reader::{JsonReader, Read, whole};
use super::output::EventCollector;

const CLOSERS: &[&str] = &[CALL_CLOSE];

#[derive(Debug)]
enum Step {
    /// Before `{`.
    Open,
    /// Before a key or `}`.
    Key,
    /// Before `:`, after the given key.
    Colon(String),
    /// Before the value of the given key.
    Value(String),
    /// In a key, or in the value of the given key, with its text so far.
    Text(Option<String>, Box<JsonReader>, String),
    /// In the arguments, which are streamed.
    Arguments(Box<JsonReader>),
    /// Before `,` or `}`.
    Comma,
    /// Before `</tool_call>` or another object.
    Close,
}

/// Result of one parser step.
enum Transition {
    To(Step),
    Wait(Step),
    /// The text is not valid JSON here.
    Bad,
    Done,
}

use Transition::{Bad, Done, To, Wait};

/// Parses the calls of one tag.
#[derive(Debug)]
pub struct HermesParser {
    step: Step,
    name: Option<String>,
    /// Arguments that came before the name.
    arguments: Option<String>,
    /// True if this object's call was emitted.
    started: bool,
    /// True if any call of the tag was emitted.
    any: bool,
    /// True if `<tool_call>` came before the object. Otherwise `</tool_call>` has to follow it.
    tagged: bool,
}

impl HermesParser {
    /// A parser after the opening tag, or at the end of the prompt, which may contain the beginning of a call.
    pub fn new(prefix: CallPrefix) -> Self {
        let (step, name) = match prefix {
            CallPrefix::Function(name) => (Step::Value("arguments".into()), Some(name)),
            CallPrefix::None | CallPrefix::AnyFunction => (Step::Open, None),
        };
        Self { step, name, arguments: None, started: false, any: false, tagged: true }
    }

    /// A parser of an object without `<tool_call>`.
    pub fn bare() -> Self {
        Self { tagged: false, ..Self::new(CallPrefix::None) }
    }

    /// Parses as far as the text goes.
    pub fn parse(&mut self, cursor: &mut Cursor, out: &mut EventCollector) -> Progress {
        loop {
            let step = std::mem::replace(&mut self.step, Step::Close);
            match self.advance(step, cursor, out) {
                To(step) => self.step = step,
                Wait(step) => {
                    self.step = step;
                    return Progress::More;
                }
                // Emitted events cannot be taken back: the call ends here.
                Bad if self.started && self.tagged => self.step = Step::Close,
                Bad => return Progress::NotACall,
                Done => return Progress::Done,
            }
        }
    }

    /// Ends the output and returns whether there was a call. An open call ends with its complete arguments.
    pub fn finish(&mut self, out: &mut EventCollector) -> bool {
        match std::mem::replace(&mut self.step, Step::Close) {
            Step::Arguments(mut reader) => cut_off_object(&mut reader, out),
            Step::Open | Step::Close => {}
            // Only the name is known.
            _ if self.name.is_some() && !self.started => {
                self.start(&self.arguments.clone().unwrap_or_default(), false, out)
            }
            _ => {}
        }
        self.any
    }

    fn advance(&mut self, step: Step, cursor: &mut Cursor, out: &mut EventCollector) -> Transition {
        if !matches!(step, Step::Text(..) | Step::Arguments(_)) {
            cursor.skip_whitespace();
        }
        let Some(next) = cursor.peek() else { return Wait(step) };
        match (step, next) {
            (Step::Open, b'{') => skip(cursor, Step::Key),
            (Step::Open, b'[') if self.tagged => skip(cursor, Step::Open),
            (Step::Key, b'"' | b'\'') => To(text(None)),
            (Step::Colon(key), b':') => skip(cursor, Step::Value(key)),
            (Step::Value(key), b'{') if is_arguments(&key) && self.name.is_some() && !self.started => {
                self.begin(out);
                cursor.take();
                To(Step::Arguments(Box::new(JsonReader::new(CLOSERS))))
            }
            (Step::Value(key), _) => To(text(Some(key))),
            (Step::Text(key, reader, text), _) => self.text(key, reader, text, cursor, out),
            (Step::Arguments(mut reader), _) => match stream_object(&mut reader, cursor, out) {
                Read::More => Wait(Step::Arguments(reader)),
                Read::End => To(Step::Comma),
                Read::CutShort => To(Step::Close),
            },
            (Step::Comma, b',') => skip(cursor, Step::Key),
            (Step::Key | Step::Comma, b'}') => self.end_of_object(cursor, out),
            (Step::Close, _) => self.close(cursor),
            // The end of the call closes the object.
            (Step::Key | Step::Comma, b'<') => match cursor.next_is(CALL_CLOSE) {
                Next::Yes if self.name.is_some() => self.end_of_call(out),
                Next::Maybe => Wait(Step::Comma),
                Next::Yes | Next::No => Bad,
            },
            (Step::Open | Step::Key | Step::Colon(_) | Step::Comma, _) => Bad,
        }
    }

    /// Parses a key, or a value that is needed whole.
    fn text(
        &mut self,
        key: Option<String>,
        mut reader: Box<JsonReader>,
        mut text: String,
        cursor: &mut Cursor,
        out: &mut EventCollector,
    ) -> Transition {
        match reader.read(cursor, &mut text) {
            Read::More => return Wait(Step::Text(key, reader, text)),
            Read::CutShort => return Bad,
            Read::End => {}
        }
        let text = text.trim();
        match key {
            None => return serde_json::from_str(text).map_or(Bad, |key| To(Step::Colon(key))),
            Some(key) if key == "name" && !self.started => match serde_json::from_str::<String>(text) {
                Ok(name) if !name.is_empty() && !reader.damaged => self.name = Some(name),
                _ => return Bad,
            },
            Some(key) if is_arguments(&key) && !self.started => match object_text(text) {
                Some(arguments) => self.arguments = Some(arguments),
                None => return Bad,
            },
            Some(_) => {}
        }
        if self.name.is_some()
            && !self.started
            && let Some(arguments) = self.arguments.take()
        {
            self.start(&arguments, true, out);
        }
        To(Step::Comma)
    }

    fn end_of_object(&mut self, cursor: &mut Cursor, out: &mut EventCollector) -> Transition {
        if self.name.is_none() {
            return Bad;
        }
        cursor.at += 1;
        self.end_of_call(out)
    }

    /// Ends an object with a name. Functions without parameters are often called without arguments.
    fn end_of_call(&mut self, out: &mut EventCollector) -> Transition {
        if !self.started {
            self.start("{}", true, out);
        }
        To(Step::Close)
    }

    /// Emits the start of the call.
    fn begin(&mut self, out: &mut EventCollector) {
        (self.started, self.any) = (true, true);
        out.tool_start(self.name.as_deref().unwrap_or_default());
    }

    /// Emits the call with these arguments.
    fn start(&mut self, arguments: &str, complete: bool, out: &mut EventCollector) {
        self.begin(out);
        out.tool_arguments(if arguments.is_empty() { "{}" } else { arguments });
        out.tool_end(complete);
    }

    /// After an object: a surplus bracket or comma is a common slip, and another call may follow.
    fn close(&mut self, cursor: &mut Cursor) -> Transition {
        if cursor.ends_in(CLOSERS) {
            cursor.at = cursor.text.len();
            return if self.tagged { Done } else { Bad };
        }
        match (cursor.eat(CALL_CLOSE), cursor.peek()) {
            (Next::Yes, _) => Done,
            (Next::Maybe, _) => Wait(Step::Close),
            (_, Some(b'}' | b']' | b',')) if self.tagged => skip(cursor, Step::Close),
            (_, Some(b'{')) if self.tagged => {
                cursor.take();
                (self.name, self.arguments, self.started) = (None, None, false);
                To(Step::Open)
            }
            _ if self.tagged => Done,
            _ => Bad,
        }
    }
}

fn text(key: Option<String>) -> Step {
    Step::Text(key, Box::new(JsonReader::new(CLOSERS)), String::new())
}

fn skip(cursor: &mut Cursor, step: Step) -> Transition {
    cursor.at += 1;
    To(step)
}

fn is_arguments(key: &str) -> bool {
    key == "arguments" || key == "parameters"
}

/// Arguments as the text of an object. Some models write them as a JSON string, or null for none.
fn object_text(text: &str) -> Option<String> {
    match text.as_bytes().first()? {
        b'{' => Some(text.to_string()),
        b'"' => {
            let inner: String = serde_json::from_str(text).ok()?;
            let inner = inner.trim();
            if inner.is_empty() { Some("{}".into()) } else { inner.starts_with('{').then(|| whole(inner).0) }
        }
        _ => (text == "null").then(|| "{}".into()),
    }
}
