//! Qwen3.5's tool calls: tags instead of JSON, and values without quotes.
//!
//! ```text
//! <tool_call>
//! <function=NAME>
//! <parameter=KEY>
//! VALUE
//! </parameter>
//! </function>
//! </tool_call>
//! ```
//!
//! The arguments are emitted as a JSON object. Strings are streamed; other values are needed whole for their type. The
//! parser tolerates missing closing tags, several functions in one tag, text between parameters (it becomes content
//! after the call) and a JSON object instead of the parameters.

use super::arguments::{Arguments, cut_off_object, stream_object};
use super::cursor::{Cursor, Next};
use super::format::{
    CALL_CLOSE, CALL_OPEN, CallPrefix, FUNCTION, FUNCTION_CLOSE, PARAMETER, PARAMETER_CLOSE, Progress, TagName,
    tag_name,
};
use super::json_reader::{JsonReader, Read};
use super::output::EventCollector;
use super::parameter::{Parameter, ValueType};
use super::tag_value::TagValue;
use super::typed::ParameterType;
use super::value_end::known_keys;
use serde_json::Value;
use std::sync::Arc;

/// Tags that end a JSON object in place of parameters.
const OBJECT_ENDS: &[&str] = &[FUNCTION_CLOSE, CALL_CLOSE];

#[derive(Debug)]
enum Step {
    /// Before `<function=`.
    Open,
    /// In a function's name.
    Name,
    /// The prompt contains the function's name.
    Named(String),
    /// Between parameters.
    Body,
    /// In a value.
    Value(Box<TagValue>),
    /// In a JSON object in place of the parameters.
    Object(JsonReader),
    /// In text where only tags are allowed.
    Stray,
    /// Before `</tool_call>` or another function.
    Close,
}

/// Result of one parser step.
enum Transition {
    To(Step),
    Wait(Step),
    NotACall,
    Done,
}

use Transition::{Done, NotACall, To, Wait};

/// Parses the calls of one tag.
#[derive(Debug)]
pub struct Qwen3CoderParser {
    definitions: Arc<[Value]>,
    step: Step,
    function: String,
    arguments: Arguments,
    /// True if `<tool_call>` came before the function.
    tagged: bool,
    /// True if a call has begun.
    started: bool,
}

impl Qwen3CoderParser {
    /// A parser at the end of the prompt, which may contain the beginning of a call.
    pub fn new(prefix: CallPrefix, definitions: Arc<[Value]>) -> Self {
        let step = match prefix {
            CallPrefix::None => Step::Open,
            CallPrefix::AnyFunction => Step::Name,
            CallPrefix::Function(name) => Step::Named(name),
        };
        let arguments = Arguments::default();
        Self { definitions, step, function: String::new(), arguments, tagged: true, started: false }
    }

    /// A parser of a function without `<tool_call>`.
    pub fn bare(definitions: Arc<[Value]>) -> Self {
        Self { tagged: false, ..Self::new(CallPrefix::None, definitions) }
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
                NotACall => return Progress::NotACall,
                Done => return Progress::Done,
            }
        }
    }

    /// Ends the output and returns whether there was a call. An open call ends with its complete arguments.
    pub fn finish(&mut self, cursor: &Cursor, out: &mut EventCollector) -> bool {
        match std::mem::replace(&mut self.step, Step::Close) {
            Step::Value(value) => {
                value.cut_off(cursor, &mut self.arguments, out);
                self.arguments.end(false, out);
            }
            Step::Object(mut reader) => cut_off_object(&mut reader, out),
            Step::Body | Step::Stray if self.started => self.arguments.end(false, out),
            _ => {}
        }
        self.started
    }

    fn advance(&mut self, step: Step, cursor: &mut Cursor, out: &mut EventCollector) -> Transition {
        match step {
            Step::Open => {
                cursor.skip_whitespace();
                match cursor.eat(FUNCTION) {
                    Next::Yes => To(Step::Name),
                    Next::Maybe => Wait(Step::Open),
                    Next::No => NotACall,
                }
            }
            Step::Name => match tag_name(cursor, cursor.at, '>') {
                TagName::Complete(name, end) => {
                    cursor.at = end;
                    self.start(name, cursor, out)
                }
                TagName::Incomplete => Wait(Step::Name),
                TagName::Bad => NotACall,
            },
            Step::Named(_) if cursor.text.is_empty() => Wait(step),
            Step::Named(name) => self.start(name, cursor, out),
            Step::Body => self.body(cursor, out),
            Step::Value(mut value) => {
                let keys = || known_keys(&self.definitions, &self.function);
                if value.read(cursor, keys, &self.arguments, out) {
                    value.end(true, &mut self.arguments, out);
                    To(Step::Body)
                } else {
                    Wait(Step::Value(value))
                }
            }
            Step::Object(mut reader) => {
                if stream_object(&mut reader, cursor, out) == Read::More {
                    return Wait(Step::Object(reader));
                }
                To(Step::Close)
            }
            Step::Stray => {
                cursor.at += cursor.rest().find('<').unwrap_or(cursor.rest().len());
                out.stray(&cursor.take());
                if cursor.text.is_empty() { Wait(Step::Stray) } else { To(Step::Body) }
            }
            Step::Close => self.close(cursor),
        }
    }

    fn start(&mut self, name: String, cursor: &mut Cursor, out: &mut EventCollector) -> Transition {
        out.tool_start(&name);
        cursor.take();
        self.function = name;
        self.started = true;
        To(Step::Body)
    }

    /// Between parameters: only tags are allowed, or a JSON object in place of the parameters.
    fn body(&mut self, cursor: &mut Cursor, out: &mut EventCollector) -> Transition {
        cursor.skip_whitespace();
        cursor.take();
        let tags = [PARAMETER, PARAMETER_CLOSE, FUNCTION_CLOSE, CALL_CLOSE, CALL_OPEN, FUNCTION];
        if cursor.text.is_empty() || cursor.ends_in(&tags) {
            return Wait(Step::Body);
        }
        let next = tags.map(|tag| cursor.next_is(tag));
        let found = next.iter().position(|&next| next == Next::Yes);
        match found.map(|at| tags[at]) {
            Some(PARAMETER) => self.parameter(cursor, out),
            // A surplus closing tag.
            Some(PARAMETER_CLOSE) => {
                cursor.at += PARAMETER_CLOSE.len();
                cursor.take();
                To(Step::Body)
            }
            Some(tag) => {
                self.arguments.end(true, out);
                match tag {
                    FUNCTION_CLOSE => {
                        cursor.at += FUNCTION_CLOSE.len();
                        To(Step::Close)
                    }
                    // Another call begins or the tag ends, so the function was not closed.
                    CALL_OPEN => Done,
                    _ => To(Step::Close),
                }
            }
            None if next.contains(&Next::Maybe) => Wait(Step::Body),
            None if cursor.peek() == Some(b'{') && self.arguments.is_empty() => {
                To(Step::Object(JsonReader::new(OBJECT_ENDS)))
            }
            None => self.stray(cursor, out),
        }
    }

    /// Treats the next character as text outside parameters.
    fn stray(&mut self, cursor: &mut Cursor, out: &mut EventCollector) -> Transition {
        cursor.skip_char();
        out.stray(&cursor.take());
        To(Step::Stray)
    }

    /// Begins a parameter at its opening tag. A parameter without a name is dropped.
    fn parameter(&mut self, cursor: &mut Cursor, out: &mut EventCollector) -> Transition {
        match tag_name(cursor, PARAMETER.len(), '>') {
            TagName::Complete(key, end) => {
                cursor.at = end;
                cursor.take();
                let schema = ParameterType::find(&self.definitions, &self.function, &key);
                let parameter = Parameter::begin(key, ValueType::Schema(schema), &mut self.arguments, out);
                To(Step::Value(Box::new(TagValue::new(parameter))))
            }
            TagName::Incomplete => Wait(Step::Body),
            TagName::Bad => {
                cursor.at += PARAMETER.len();
                cursor.take();
                To(Step::Stray)
            }
        }
    }

    /// After a function: another one may follow in the same tag.
    fn close(&mut self, cursor: &mut Cursor) -> Transition {
        cursor.skip_whitespace();
        if cursor.ends_in(&[FUNCTION_CLOSE, CALL_CLOSE, FUNCTION]) {
            cursor.at = cursor.text.len();
            return Done;
        }
        let function = if self.tagged { cursor.next_is(FUNCTION) } else { Next::No };
        match (cursor.eat(FUNCTION_CLOSE), cursor.eat(CALL_CLOSE), function) {
            (_, Next::Yes, _) => Done,
            (Next::Yes, ..) => To(Step::Close),
            (.., Next::Yes) => {
                cursor.take();
                To(Step::Open)
            }
            (Next::No, Next::No, Next::No) => Done,
            _ => Wait(Step::Close),
        }
    }
}
