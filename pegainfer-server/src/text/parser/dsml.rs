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
//! The arguments are emitted as a JSON object. Strings are streamed; other values are needed whole.

use super::cursor::{Cursor, Next, Seek};
use super::format::{CallPrefix, DSML_INVOKE, Progress};
use super::output::Output;
use serde_json::Value;

const CLOSE: &str = "</｜DSML｜tool_calls>";
const INVOKE_CLOSE: &str = "</｜DSML｜invoke>";
const PARAMETER: &str = "<｜DSML｜parameter name=\"";
const PARAMETER_CLOSE: &str = "</｜DSML｜parameter>";
/// Separator between a parameter's name and `true` or `false`.
const STRING: &str = "\" string=\"";
/// Maximum length in bytes of the rest of a tag after its beginning; longer text is not a tag.
const MAX_NAME: usize = 256;

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
    /// In a parameter's name and kind.
    Key,
    /// In a value that is a string.
    Text,
    /// In a value that is JSON.
    Json,
    /// In text where only tags are allowed: it becomes content.
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

/// Parses one block after the other.
#[derive(Debug)]
pub struct DsmlParser {
    step: Step,
    /// Number of parameters of this invocation that were emitted.
    parameters: usize,
    /// Whether the position is inside an invocation.
    invoked: bool,
    /// Whether an invocation of the block was emitted.
    started: bool,
}

impl DsmlParser {
    /// A parser at the end of the prompt, which may contain the beginning of a call.
    pub fn new(prefix: CallPrefix) -> Self {
        let step = match prefix {
            CallPrefix::None => Step::Block,
            CallPrefix::AnyFunction => Step::Name,
            CallPrefix::Function(name) => Step::Named(name),
        };
        Self { step, parameters: 0, invoked: false, started: false }
    }

    /// Starts the next block.
    pub fn begin(&mut self) {
        *self = Self::new(CallPrefix::None);
    }

    /// Parses as far as the text goes.
    pub fn parse(&mut self, cursor: &mut Cursor, out: &mut Output) -> Progress {
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

    /// Ends the text with the held-back rest `held`; returns whether that belongs to a call. A cut-off value is emitted as far
    /// as it goes.
    pub fn finish(&mut self, held: &str, out: &mut Output) -> bool {
        match self.step {
            Step::Text => out.tool_arguments(&escaped(held)),
            Step::Json => out.tool_arguments(held),
            _ => {}
        }
        self.started
    }

    fn advance(&mut self, step: Step, cursor: &mut Cursor, out: &mut Output) -> Transition {
        match step {
            Step::Block => self.block(cursor),
            Step::Name => match cursor.rest().find(['>', '\n']) {
                Some(end) if cursor.rest()[..end].ends_with('"') && (2..=MAX_NAME).contains(&end) => {
                    let name = cursor.rest()[..end - 1].to_owned();
                    cursor.at += end + 1;
                    self.start(&name, cursor, out)
                }
                None if cursor.rest().len() <= MAX_NAME => Wait(Step::Name),
                _ => self.stray(cursor, out),
            },
            Step::Named(_) if cursor.text.is_empty() => Wait(step),
            Step::Named(name) => self.start(&name, cursor, out),
            Step::Body => self.body(cursor, out),
            Step::Key => self.key(cursor, out),
            Step::Text => {
                let close = cursor.seek(PARAMETER_CLOSE);
                cursor.at = close.at();
                out.tool_arguments(&escaped(&cursor.take()));
                match close {
                    Seek::Found(_) => self.value_ends("\"", cursor, out),
                    Seek::Pending(_) => Wait(Step::Text),
                }
            }
            Step::Json => match cursor.seek(PARAMETER_CLOSE) {
                Seek::Found(at) => {
                    cursor.at = at;
                    let text = cursor.take();
                    // Invalid JSON becomes a string, so that the arguments stay valid.
                    let value = serde_json::from_str::<Value>(&text).unwrap_or(Value::String(text));
                    self.value_ends(&value.to_string(), cursor, out)
                }
                Seek::Pending(_) => {
                    cursor.at = 0;
                    Wait(Step::Json)
                }
            },
            Step::Stray => {
                cursor.at += cursor.rest().find('<').unwrap_or(cursor.rest().len());
                out.content(&cursor.take());
                let next = if self.invoked { Step::Body } else { Step::Block };
                if cursor.text.is_empty() { Wait(Step::Stray) } else { To(next) }
            }
        }
    }

    fn block(&mut self, cursor: &mut Cursor) -> Transition {
        cursor.skip_whitespace();
        match [DSML_INVOKE, CLOSE].map(|tag| cursor.next_is(tag)) {
            [Next::Yes, _] => {
                cursor.at += DSML_INVOKE.len();
                To(Step::Name)
            }
            [_, Next::Yes] if self.started => {
                cursor.at += CLOSE.len();
                Done
            }
            [Next::No, Next::No | Next::Yes] if !self.started => NotACall,
            [Next::No, Next::No] => Done,
            _ => Wait(Step::Block),
        }
    }

    fn start(&mut self, name: &str, cursor: &mut Cursor, out: &mut Output) -> Transition {
        out.tool_start(name);
        cursor.take();
        (self.parameters, self.invoked, self.started) = (0, true, true);
        To(Step::Body)
    }

    fn body(&mut self, cursor: &mut Cursor, out: &mut Output) -> Transition {
        cursor.skip_whitespace();
        cursor.take();
        match [PARAMETER, INVOKE_CLOSE].map(|tag| cursor.next_is(tag)) {
            [Next::Yes, _] => {
                cursor.at += PARAMETER.len();
                To(Step::Key)
            }
            [_, Next::Yes] => {
                cursor.at += INVOKE_CLOSE.len();
                cursor.take();
                out.tool_arguments(if self.parameters == 0 { "{}" } else { "}" });
                self.invoked = false;
                To(Step::Block)
            }
            [Next::No, Next::No] => self.stray(cursor, out),
            _ => Wait(Step::Body),
        }
    }

    fn key(&mut self, cursor: &mut Cursor, out: &mut Output) -> Transition {
        let rest = cursor.rest();
        let Some(end) = rest.find(['>', '\n']) else {
            return if rest.len() <= MAX_NAME { Wait(Step::Key) } else { self.stray(cursor, out) };
        };
        let parts = rest[..end].strip_suffix('"').and_then(|tag| tag.split_once(STRING));
        let (key, is_string) = match parts {
            Some((key, "true")) => (key.to_owned(), true),
            Some((key, "false")) => (key.to_owned(), false),
            _ => return self.stray(cursor, out),
        };
        cursor.at += end + 1;
        cursor.take();
        let separator = if self.parameters == 0 { "{" } else { ", " };
        let quote = if is_string { "\"" } else { "" };
        out.tool_arguments(&format!("{separator}{}: {quote}", Value::from(key)));
        self.parameters += 1;
        To(if is_string { Step::Text } else { Step::Json })
    }

    /// Ends a value with the text `last`; its closing tag is next.
    fn value_ends(&mut self, last: &str, cursor: &mut Cursor, out: &mut Output) -> Transition {
        out.tool_arguments(last);
        cursor.at += PARAMETER_CLOSE.len();
        cursor.take();
        To(Step::Body)
    }

    /// Treats the next character as content: it does not begin a tag.
    fn stray(&mut self, cursor: &mut Cursor, out: &mut Output) -> Transition {
        if !self.started {
            return NotACall;
        }
        cursor.at += cursor.rest().chars().next().map_or(0, char::len_utf8);
        out.content(&cursor.take());
        To(Step::Stray)
    }
}

/// Contents of a JSON string: `text` with JSON escapes.
fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{describe, parse};
    use super::super::{CallPrefix, ParserOptions, ReasoningStart, ToolFormat};

    fn options(reasoning: ReasoningStart, prefix: CallPrefix) -> ParserOptions {
        ParserOptions {
            reasoning,
            include_reasoning: true,
            tools: Some(ToolFormat::Dsml),
            prefix,
            definitions: std::sync::Arc::new([]),
            max_calls: usize::MAX,
            id_seed: 7,
        }
    }

    const CALL: &str = "hm\n</think>I look.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n\
        <｜DSML｜parameter name=\"k\" string=\"true\">a \"b\" </x> é</｜DSML｜parameter>\n\
        <｜DSML｜parameter name=\"n\" string=\"false\">[1, {\"x\": null}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n\
        <｜DSML｜invoke name=\"g\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";

    fn expected() -> Vec<String> {
        let arguments = "A0 {\"k\": \"a \\\"b\\\" </x> é\", \"n\": [1,{\"x\":null}]}";
        ["R hm", "C I look.", "T0 f", arguments, "T1 g", "A1 {}"].map(str::to_owned).to_vec()
    }

    #[test]
    fn every_cut_gives_the_same_events() {
        let whole = describe(&parse(options(ReasoningStart::Opened, CallPrefix::None), [CALL]));
        assert_eq!(whole, expected());
        for (cut, _) in CALL.char_indices() {
            let (a, b) = CALL.split_at(cut);
            assert_eq!(
                describe(&parse(options(ReasoningStart::Opened, CallPrefix::None), [a, b])),
                whole,
                "cut at {cut}"
            );
        }
        let characters: Vec<String> = CALL.chars().map(String::from).collect();
        let singly = parse(options(ReasoningStart::Opened, CallPrefix::None), characters.iter().map(String::as_str));
        assert_eq!(describe(&singly), whole);
    }

    #[test]
    fn text_that_is_no_call_becomes_content_and_cut_off_calls_are_emitted() {
        let read = |prefix, text: &str| describe(&parse(options(ReasoningStart::Never, prefix), [text]));
        let none = || CallPrefix::None;
        assert_eq!(read(none(), "a <｜DSML｜tool_calls> b"), ["C a <｜DSML｜tool_calls> b"]);
        assert_eq!(read(none(), "a <｜DSML｜tool"), ["C a <｜DSML｜tool"]);
        let open = "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n";
        let cut = format!("{open}<｜DSML｜parameter name=\"k\" string=\"true\">ab");
        assert_eq!(read(none(), &cut), ["T0 f", "A0 {\"k\": \"ab"]);
        let wrong = format!(
            "{open}<｜DSML｜parameter name=\"k\" string=\"false\">yes</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>"
        );
        assert_eq!(read(none(), &wrong), ["T0 f", "A0 {\"k\": \"yes\"}"]);
        let stray = format!("{open}oops</｜DSML｜invoke></｜DSML｜tool_calls> z");
        assert_eq!(read(none(), &stray), ["T0 f", "C oops", "A0 {}", "C z"]);
        assert_eq!(read(CallPrefix::AnyFunction, "g\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"), ["T0 g", "A0 {}"]);
        assert_eq!(read(CallPrefix::Function("h".into()), "</｜DSML｜invoke>"), ["T0 h", "A0 {}"]);
    }
}
