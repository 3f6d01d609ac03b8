//! Qwen3's (Hermes) tool calls: `{"name": …, "arguments": {…}}` between `<tool_call>` and `</tool_call>`.
//!
//! No event is emitted before it is certain that there is a call: the name is known and the arguments have begun. From then
//! on the arguments are streamed. If the name comes after the arguments, they are held back until it is known.

use super::cursor::{Cursor, Next};
use super::format::{CALL_CLOSE, CallPrefix, Progress};
use super::output::Output;

/// End of a call inside a string: JSON strings contain no line breaks, so the string was never closed.
const CLOSE_IN_STRING: &str = "\n</tool_call>";

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
    /// In a key, or in the value of the given key, which began at this byte.
    Text(Option<String>, usize, Scanner),
    /// In the arguments, which are streamed.
    Arguments(Scanner),
    /// Before `,` or `}`.
    Comma,
    /// Before `</tool_call>`.
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

/// Parses one call after the other.
#[derive(Debug)]
pub struct HermesParser {
    step: Step,
    name: Option<String>,
    /// Arguments that came before the name.
    arguments: Option<String>,
    /// Whether the start of the call was emitted.
    started: bool,
}

impl HermesParser {
    /// A parser at the end of the prompt, which may contain the beginning of a call.
    pub fn new(prefix: CallPrefix) -> Self {
        let (step, name) = match prefix {
            CallPrefix::Function(name) => (Step::Value("arguments".into()), Some(name)),
            CallPrefix::None | CallPrefix::AnyFunction => (Step::Open, None),
        };
        Self { step, name, arguments: None, started: false }
    }

    /// Starts the next call.
    pub fn begin(&mut self) {
        *self = Self::new(CallPrefix::AnyFunction);
    }

    /// Parses as far as the text goes.
    pub fn parse(&mut self, cursor: &mut Cursor, out: &mut Output) -> Progress {
        loop {
            let step = std::mem::replace(&mut self.step, Step::Close);
            match self.advance(step, cursor, out) {
                To(step) => self.step = step,
                Wait(step) => {
                    self.step = step;
                    return Progress::More;
                }
                // Emitted events cannot be taken back: the call ends here.
                Bad if self.started => self.step = Step::Close,
                Bad => return Progress::NotACall,
                Done => return Progress::Done,
            }
        }
    }

    /// Ends the text with the held-back rest `held`; returns whether that belongs to a call.
    pub fn finish(&mut self, held: &str, out: &mut Output) -> bool {
        // Outside a string it can only be part of `</tool_call>`.
        if let Step::Arguments(Scanner { in_string: true, .. }) = self.step {
            out.tool_arguments(held);
        }
        self.started
    }

    fn advance(&mut self, step: Step, cursor: &mut Cursor, out: &mut Output) -> Transition {
        if !matches!(step, Step::Text(..) | Step::Arguments(_)) {
            cursor.skip_whitespace();
        }
        let Some(next) = cursor.peek() else { return Wait(step) };
        match (step, next) {
            (Step::Open, b'{') => skip(cursor, Step::Key),
            (Step::Key, b'"') => To(Step::Text(None, cursor.at, Scanner::default())),
            (Step::Colon(key), b':') => skip(cursor, Step::Value(key)),
            (Step::Value(key), b'{') if is_arguments(&key) && self.name.is_some() && !self.started => {
                self.start(out);
                cursor.take();
                To(Step::Arguments(Scanner::default()))
            }
            (Step::Value(key), _) => To(Step::Text(Some(key), cursor.at, Scanner::default())),
            (Step::Text(key, start, scanner), _) => self.text(key, start, scanner, cursor, out),
            (Step::Arguments(mut scanner), _) => {
                let scanned = scanner.scan(cursor);
                out.tool_arguments(&cursor.take());
                match scanned {
                    Scanned::More => Wait(Step::Arguments(scanner)),
                    Scanned::End => To(Step::Comma),
                    Scanned::CutShort => To(Step::Close),
                }
            }
            (Step::Comma, b',') => skip(cursor, Step::Key),
            (Step::Key | Step::Comma, b'}') => self.end_of_object(cursor, out),
            // One brace too many is a common slip.
            (Step::Close, b'}') => skip(cursor, Step::Close),
            (Step::Close, _) => match cursor.eat(CALL_CLOSE) {
                Next::Maybe => Wait(Step::Close),
                Next::Yes | Next::No => Done,
            },
            (Step::Open | Step::Key | Step::Colon(_) | Step::Comma, _) => Bad,
        }
    }

    /// Parses a key, or a value that is needed whole.
    fn text(
        &mut self,
        key: Option<String>,
        start: usize,
        mut scanner: Scanner,
        cursor: &mut Cursor,
        out: &mut Output,
    ) -> Transition {
        match scanner.scan(cursor) {
            Scanned::More => return Wait(Step::Text(key, start, scanner)),
            Scanned::CutShort => return Bad,
            Scanned::End => {}
        }
        let text = &cursor.text[start..cursor.at];
        match key {
            None => return serde_json::from_str(text).map_or(Bad, |key| To(Step::Colon(key))),
            Some(key) if key == "name" && !self.started => match serde_json::from_str::<String>(text) {
                Ok(name) if !name.is_empty() => self.name = Some(name),
                _ => return Bad,
            },
            Some(key) if is_arguments(&key) && !self.started => match object_text(text) {
                Some(arguments) => self.arguments = Some(arguments),
                None => return Bad,
            },
            Some(_) => {}
        }
        if self.name.is_some() && self.arguments.is_some() {
            self.start(out);
        }
        To(Step::Comma)
    }

    fn end_of_object(&mut self, cursor: &mut Cursor, out: &mut Output) -> Transition {
        if !self.started {
            if self.name.is_none() {
                return Bad;
            }
            // A function without parameters is often called without arguments.
            self.arguments = Some("{}".into());
            self.start(out);
        }
        skip(cursor, Step::Close)
    }

    /// Emits the start of the call, with the arguments that are known.
    fn start(&mut self, out: &mut Output) {
        self.started = true;
        out.tool_start(self.name.as_deref().unwrap_or_default());
        out.tool_arguments(self.arguments.as_deref().unwrap_or_default());
    }
}

fn skip(cursor: &mut Cursor, step: Step) -> Transition {
    cursor.at += 1;
    To(step)
}

fn is_arguments(key: &str) -> bool {
    key == "arguments" || key == "parameters"
}

/// Arguments as the text of an object; some models write them as a string of JSON, or null for none.
fn object_text(text: &str) -> Option<String> {
    match text.as_bytes().first()? {
        b'{' => Some(text.to_string()),
        b'"' => {
            let inner: String = serde_json::from_str(text).ok()?;
            if inner.is_empty() { Some("{}".into()) } else { inner.starts_with('{').then_some(inner) }
        }
        _ => (text == "null").then(|| "{}".into()),
    }
}

/// Finds the end of a JSON value. It tracks only brackets and quotes; the client validates the rest.
#[derive(Debug, Default)]
struct Scanner {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

enum Scanned {
    More,
    /// The position is after the value.
    End,
    /// The position is at the `</tool_call>` that ends the call before the value is complete.
    CutShort,
}

impl Scanner {
    fn scan(&mut self, cursor: &mut Cursor) -> Scanned {
        while let Some(byte) = cursor.peek() {
            match cursor.next_is(if self.in_string { CLOSE_IN_STRING } else { CALL_CLOSE }) {
                Next::Yes => return Scanned::CutShort,
                Next::Maybe => return Scanned::More,
                Next::No => {}
            }
            // A bare word or number ends before the byte that follows it.
            if self.depth == 0 && !self.in_string && b",}] \n\r\t".contains(&byte) {
                return Scanned::End;
            }
            cursor.at += 1;
            if self.step(byte) {
                return Scanned::End;
            }
        }
        Scanned::More
    }

    /// Advances by one byte; true for the last byte of a string, list or object.
    fn step(&mut self, byte: u8) -> bool {
        if self.in_string {
            let closed = byte == b'"' && !self.escaped;
            self.escaped = byte == b'\\' && !self.escaped;
            self.in_string = !closed;
            return closed && self.depth == 0;
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth -= 1;
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }
}
