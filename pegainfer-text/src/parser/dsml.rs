//! DeepSeek-V4's tool calls: a block of invocations whose values are marked as strings or as JSON.
//!
//! ```text
//! <｜DSML｜tool_calls>
//! <｜DSML｜invoke name="NAME">
//! <｜DSML｜parameter name="KEY" string="true|false">VALUE</｜DSML｜parameter>
//! </｜DSML｜invoke>
//! </｜DSML｜tool_calls>
//! ```
//!
//! The arguments are emitted as a JSON object. Strings are streamed; other values are needed whole. The parser
//! tolerates missing closing tags, other names of the outer tag, values without their kind, text between parameters (it
//! becomes content after the call) and a JSON object instead of the parameters.

use super::arguments::{Arguments, cut_off_object, stream_object};
use super::cursor::{Cursor, Next};
use super::dsml_tags::{
    INVOKE_CLOSE, PARAMETER, PARAMETER_CLOSE, ValueSearch, is_cut_off, outer_close, without_partial_tag,
};
use super::format::{CallPrefix, DSML_INVOKE, MAX_NAME, Progress, TagName, tag_name};
use super::json_reader::{JsonReader, Read};
use super::output::EventCollector;
use super::parameter::{Parameter, ValueType};
use super::typed::ParameterType;
use super::value_end::{ValueEnd, known_keys};
use serde_json::Value;
use std::sync::Arc;

/// Tags that end a JSON object in place of parameters.
const OBJECT_ENDS: &[&str] = &["</｜DSML｜"];

#[derive(Debug)]
enum Step {
    /// Before an invocation or the end of the block.
    Block,
    /// In a function's name.
    Name,
    /// The prompt contains the function's name.
    Named(String),
    /// Between parameters.
    Body,
    /// In a value, with the number of opening tags that are part of it.
    Value(Box<Parameter>, usize),
    /// In a JSON object in place of the parameters.
    Object(JsonReader),
    /// In text where only tags are allowed.
    Stray,
}

/// Result of one parser step.
enum Transition {
    To(Step),
    Wait(Step),
    NotACall,
    Done,
}

use Transition::{Done, NotACall, To, Wait};

/// Parses one block.
#[derive(Debug)]
pub struct DsmlParser {
    definitions: Arc<[Value]>,
    step: Step,
    function: String,
    arguments: Arguments,
    /// True if the position is inside an invocation.
    invoked: bool,
    /// True if an invocation of the block was emitted.
    started: bool,
}

impl DsmlParser {
    /// A parser after the outer tag, or at the end of the prompt, which may contain the beginning of a call.
    pub fn new(prefix: CallPrefix, definitions: Arc<[Value]>) -> Self {
        let step = match prefix {
            CallPrefix::None => Step::Block,
            CallPrefix::AnyFunction => Step::Name,
            CallPrefix::Function(name) => Step::Named(name),
        };
        let arguments = Arguments::default();
        Self { definitions, step, function: String::new(), arguments, invoked: false, started: false }
    }

    /// Parses as far as the text goes.
    pub fn parse(&mut self, cursor: &mut Cursor, out: &mut EventCollector) -> Progress {
        loop {
            let step = std::mem::replace(&mut self.step, Step::Block);
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
        match std::mem::replace(&mut self.step, Step::Block) {
            Step::Value(mut parameter, _) => {
                parameter.push(without_partial_tag(&cursor.text), &self.arguments, out);
                parameter.end(false, &mut self.arguments, out);
                self.arguments.end(false, out);
            }
            Step::Object(mut reader) => cut_off_object(&mut reader, out),
            _ if self.invoked => self.arguments.end(false, out),
            _ => {}
        }
        self.started
    }

    fn advance(&mut self, step: Step, cursor: &mut Cursor, out: &mut EventCollector) -> Transition {
        match step {
            Step::Block => self.block(cursor),
            Step::Name => match tag_name(cursor, cursor.at, '"') {
                TagName::Complete(name, end) => match cursor.begins(end, ">") {
                    Next::Yes => {
                        cursor.at = end + 1;
                        self.start(&name, cursor, out)
                    }
                    Next::Maybe => Wait(Step::Name),
                    Next::No => NotACall,
                },
                TagName::Incomplete => Wait(Step::Name),
                TagName::Bad => NotACall,
            },
            Step::Named(_) if cursor.text.is_empty() => Wait(step),
            Step::Named(name) => self.start(&name, cursor, out),
            Step::Body => self.body(cursor, out),
            Step::Value(parameter, nested) => self.value(parameter, nested, cursor, out),
            Step::Object(mut reader) => {
                if stream_object(&mut reader, cursor, out) == Read::More {
                    return Wait(Step::Object(reader));
                }
                self.invoked = false;
                To(Step::Block)
            }
            Step::Stray => {
                cursor.at += cursor.rest().find('<').unwrap_or(cursor.rest().len());
                out.stray(&cursor.take());
                if cursor.text.is_empty() { Wait(Step::Stray) } else { To(Step::Body) }
            }
        }
    }

    fn block(&mut self, cursor: &mut Cursor) -> Transition {
        cursor.skip_whitespace();
        if self.started && is_cut_off(cursor) {
            cursor.at = cursor.text.len();
            return Done;
        }
        let (outer, _) = outer_close(cursor, cursor.at);
        match [cursor.next_is(DSML_INVOKE), cursor.next_is(INVOKE_CLOSE), outer] {
            [Next::Yes, ..] => {
                cursor.at += DSML_INVOKE.len();
                To(Step::Name)
            }
            // An extra closing tag, or one after an object in place of parameters.
            [_, Next::Yes, _] if self.started => {
                cursor.at += INVOKE_CLOSE.len();
                To(Step::Block)
            }
            [.., Next::Yes] if self.started => {
                cursor.at = outer_close(cursor, cursor.at).1;
                Done
            }
            [Next::Maybe, ..] => Wait(Step::Block),
            _ if !self.started => NotACall,
            [Next::No, Next::No, Next::No] => Done,
            _ => Wait(Step::Block),
        }
    }

    fn start(&mut self, name: &str, cursor: &mut Cursor, out: &mut EventCollector) -> Transition {
        out.tool_start(name);
        cursor.take();
        self.function = name.to_owned();
        (self.invoked, self.started) = (true, true);
        To(Step::Body)
    }

    /// Ends the invocation.
    fn end(&mut self, out: &mut EventCollector) -> Transition {
        self.arguments.end(true, out);
        self.invoked = false;
        To(Step::Block)
    }

    fn body(&mut self, cursor: &mut Cursor, out: &mut EventCollector) -> Transition {
        cursor.skip_whitespace();
        cursor.take();
        if cursor.text.is_empty() || is_cut_off(cursor) {
            return Wait(Step::Body);
        }
        let (outer, _) = outer_close(cursor, 0);
        let tags = [PARAMETER, PARAMETER_CLOSE, INVOKE_CLOSE, DSML_INVOKE].map(|tag| cursor.next_is(tag));
        match tags {
            [Next::Yes, ..] => self.parameter(cursor, out),
            // A surplus closing tag.
            [_, Next::Yes, ..] => {
                cursor.at += PARAMETER_CLOSE.len();
                cursor.take();
                To(Step::Body)
            }
            [_, _, Next::Yes, _] => {
                cursor.at += INVOKE_CLOSE.len();
                cursor.take();
                self.end(out)
            }
            // The invocation was not closed.
            [.., Next::Yes] => self.end(out),
            _ if outer == Next::Yes => self.end(out),
            tags if tags.contains(&Next::Maybe) || outer == Next::Maybe => Wait(Step::Body),
            _ if cursor.peek() == Some(b'{') && self.arguments.is_empty() => {
                To(Step::Object(JsonReader::new(OBJECT_ENDS)))
            }
            _ => self.stray(cursor, out),
        }
    }

    /// Begins a parameter at its opening tag.
    fn parameter(&mut self, cursor: &mut Cursor, out: &mut EventCollector) -> Transition {
        let (key, end) = match tag_name(cursor, PARAMETER.len(), '"') {
            TagName::Complete(key, end) => (key, end),
            TagName::Incomplete => return Wait(Step::Body),
            TagName::Bad => return self.stray(cursor, out),
        };
        let attributes = &cursor.text[end..];
        let Some(length) = attributes.find(['>', '\n']) else {
            let wait = attributes.len() <= MAX_NAME;
            return if wait { Wait(Step::Body) } else { self.stray(cursor, out) };
        };
        if !attributes[length..].starts_with('>') {
            return self.stray(cursor, out);
        }
        let schema = || ParameterType::find(&self.definitions, &self.function, &key);
        let value_type = match attributes[..length].trim() {
            "string=\"true\"" => ValueType::Text,
            "string=\"false\"" if schema().begins_as_text() => ValueType::Json,
            // Without the attribute, the schema decides the type.
            _ => ValueType::Schema(schema()),
        };
        cursor.at = end + length + 1;
        cursor.take();
        To(Step::Value(Box::new(Parameter::begin(key, value_type, &mut self.arguments, out)), 0))
    }

    fn value(
        &mut self,
        mut parameter: Box<Parameter>,
        nested: usize,
        cursor: &mut Cursor,
        out: &mut EventCollector,
    ) -> Transition {
        let search = ValueSearch {
            cursor,
            definitions: &self.definitions,
            keys: &if cursor.text.contains('<') { known_keys(&self.definitions, &self.function) } else { vec![] },
            given: &|key| self.arguments.contains(key) || parameter.key == key,
            is_text: parameter.is_text(),
        };
        let (found, nested) = search.run(nested);
        match found {
            ValueEnd::At(end, tag) => {
                let text = &cursor.text[..end];
                // A line break before another tag is layout.
                let text = if tag == 0 { text.strip_suffix('\n').unwrap_or(text) } else { text };
                parameter.push(text, &self.arguments, out);
                cursor.at = end + tag;
                cursor.take();
                parameter.end(true, &mut self.arguments, out);
                To(Step::Body)
            }
            ValueEnd::After(_) if cursor.ended => Wait(Step::Value(parameter, nested)),
            ValueEnd::After(end) => {
                let text = &cursor.text[..end];
                // Hold it back until it is known whether a tag follows.
                let text = text.strip_suffix('\n').unwrap_or(text);
                parameter.push(text, &self.arguments, out);
                cursor.at = text.len();
                cursor.take();
                Wait(Step::Value(parameter, nested))
            }
        }
    }

    /// Treats the next character as text outside parameters.
    fn stray(&mut self, cursor: &mut Cursor, out: &mut EventCollector) -> Transition {
        cursor.skip_char();
        out.stray(&cursor.take());
        To(Step::Stray)
    }
}
