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
//! The arguments are emitted as a JSON object. Strings are streamed; other values are needed whole to be typed. A missing
//! `</parameter>` or `</function>` is tolerated.

use super::cursor::{Cursor, Next};
use super::format::{CALL_CLOSE, CallPrefix, Progress};
use super::output::Output;
use super::parameter::{FUNCTION_CLOSE, PARAMETER, Parameter};
use super::typed::ParameterType;
use serde_json::Value;
use std::sync::Arc;

/// Beginning of the opening tag of a function, before its name.
pub const FUNCTION: &str = "<function=";
/// Maximum length of names and keys in bytes; longer text is not a tag.
const MAX_NAME: usize = 256;

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
    /// In a parameter's name.
    Key,
    /// In a value.
    Value(Parameter),
    /// In text where only tags are allowed: it becomes content.
    Stray,
    /// Before `</tool_call>`.
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

/// Parses one call after the other.
#[derive(Debug)]
pub struct Qwen3CoderParser {
    definitions: Arc<[Value]>,
    step: Step,
    function: String,
    /// Number of parameters that were emitted.
    parameters: usize,
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
        Self { definitions, step, function: String::new(), parameters: 0, started: false }
    }

    /// Starts the next call.
    pub fn begin(&mut self) {
        (self.step, self.parameters, self.started) = (Step::Open, 0, false);
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
                NotACall => return Progress::NotACall,
                Done => return Progress::Done,
            }
        }
    }

    /// Ends the text with the held-back rest `held`; returns whether that belongs to a call.
    pub fn finish(&mut self, held: &str, out: &mut Output) -> bool {
        if let Step::Value(parameter) = &mut self.step
            && parameter.finish(held, out)
        {
            out.tool_arguments("}");
        }
        self.started
    }

    fn advance(&mut self, step: Step, cursor: &mut Cursor, out: &mut Output) -> Transition {
        match step {
            Step::Open => {
                cursor.skip_whitespace();
                match cursor.eat(FUNCTION) {
                    Next::Yes => To(Step::Name),
                    Next::Maybe => Wait(Step::Open),
                    Next::No => NotACall,
                }
            }
            Step::Name => match tag_name(cursor) {
                TagName::Complete(name) => self.start(name, cursor, out),
                TagName::Incomplete => Wait(Step::Name),
                TagName::Bad => NotACall,
            },
            Step::Named(_) if cursor.text.is_empty() => Wait(step),
            Step::Named(name) => self.start(name, cursor, out),
            Step::Body => self.body(cursor, out),
            Step::Key => match tag_name(cursor) {
                TagName::Complete(key) => self.key(&key, cursor, out),
                TagName::Incomplete => Wait(Step::Key),
                TagName::Bad => {
                    out.content(&cursor.take());
                    To(Step::Stray)
                }
            },
            Step::Value(mut parameter) => {
                if parameter.read(cursor, out) {
                    To(Step::Body)
                } else {
                    Wait(Step::Value(parameter))
                }
            }
            Step::Stray => {
                cursor.at += cursor.rest().find('<').unwrap_or(cursor.rest().len());
                out.content(&cursor.take());
                if cursor.text.is_empty() { Wait(Step::Stray) } else { To(Step::Body) }
            }
            Step::Close => {
                cursor.skip_whitespace();
                match cursor.eat(CALL_CLOSE) {
                    Next::Maybe => Wait(Step::Close),
                    Next::Yes | Next::No => Done,
                }
            }
        }
    }

    fn start(&mut self, name: String, cursor: &mut Cursor, out: &mut Output) -> Transition {
        out.tool_start(&name);
        cursor.take();
        self.function = name;
        self.started = true;
        To(Step::Body)
    }

    fn body(&mut self, cursor: &mut Cursor, out: &mut Output) -> Transition {
        cursor.skip_whitespace();
        cursor.take();
        let next = [PARAMETER, FUNCTION_CLOSE, CALL_CLOSE].map(|tag| cursor.next_is(tag));
        match next {
            [Next::Yes, ..] => {
                cursor.at += PARAMETER.len();
                To(Step::Key)
            }
            [_, Next::Yes, _] | [.., Next::Yes] => {
                // `</tool_call>` is left to `Step::Close`, in case it ends a function that was not closed.
                cursor.at += if next[1] == Next::Yes { FUNCTION_CLOSE.len() } else { 0 };
                out.tool_arguments(if self.parameters == 0 { "{}" } else { "}" });
                To(Step::Close)
            }
            [Next::No, Next::No, Next::No] => {
                cursor.at += cursor.rest().chars().next().map_or(0, char::len_utf8);
                To(Step::Stray)
            }
            _ => Wait(Step::Body),
        }
    }

    fn key(&mut self, key: &str, cursor: &mut Cursor, out: &mut Output) -> Transition {
        cursor.take();
        let kind = ParameterType::of(&self.definitions, &self.function, key);
        let separator = if self.parameters == 0 { "{" } else { ", " };
        out.tool_arguments(&format!("{separator}{}: ", Value::from(key)));
        self.parameters += 1;
        To(Step::Value(Parameter::open(kind, out)))
    }
}

enum TagName {
    /// The position is after the `>`.
    Complete(String),
    Incomplete,
    Bad,
}

/// Parses a name up to `>`.
fn tag_name(cursor: &mut Cursor) -> TagName {
    let rest = cursor.rest();
    match rest.find(['>', '<', '\n']) {
        Some(end) if rest.as_bytes()[end] == b'>' && (1..=MAX_NAME).contains(&end) => {
            let name = rest[..end].trim().to_string();
            cursor.at += end + 1;
            TagName::Complete(name)
        }
        None if rest.len() <= MAX_NAME => TagName::Incomplete,
        _ => TagName::Bad,
    }
}
