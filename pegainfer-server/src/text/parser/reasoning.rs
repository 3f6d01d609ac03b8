//! Splits reasoning (`<think>` … `</think>`) from the content after it.

use super::cursor::{Cursor, Next, Seek, begins_after_space};
use super::format::{CALL_OPEN, ToolFormat};
use super::output::Output;
use super::qwen3_coder::FUNCTION;
use serde::{Deserialize, Serialize};

/// Opening tag of the reasoning.
pub const OPEN: &str = "<think>";
/// Closing tag of the reasoning.
pub const CLOSE: &str = "</think>";

/// What the prompt tells about reasoning in the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReasoningStart {
    /// There is no reasoning.
    Never,
    /// The model may open it.
    IfOpened,
    /// The prompt has opened it.
    Opened,
}

impl ReasoningStart {
    /// Detects it from the end of the prompt of a model that reasons.
    pub fn after(prompt: &str) -> Self {
        if prompt.trim_end().ends_with(OPEN) { Self::Opened } else { Self::IfOpened }
    }

    /// Whether reasoning can follow this prompt: not if the prompt continues a message, nor if it ends with an empty
    /// reasoning block, which templates write to switch reasoning off.
    pub fn may_follow(self, prompt: &str, continued: bool) -> bool {
        self == Self::Opened || (self == Self::IfOpened && !continued && !prompt.trim_end().ends_with(CLOSE))
    }

    /// The text that closes reasoning opened by the prompt, as the templates of this format write an empty block.
    pub fn close(self, tools: Option<ToolFormat>) -> &'static str {
        match (self, tools) {
            (Self::Opened, Some(ToolFormat::Dsml)) => CLOSE,
            (Self::Opened, _) => "\n</think>\n\n",
            (Self::Never | Self::IfOpened, _) => "",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Before an optional `<think>`.
    Start,
    /// Line breaks after `<think>`.
    Opened,
    Reasoning,
    /// Line breaks after `</think>`.
    Closed,
    Content,
}

/// Splits reasoning from content. The line breaks next to the tags belong to neither.
pub struct ReasoningParser {
    cursor: Cursor,
    step: Step,
    /// Whether a call may begin without `</think>`, as in Qwen3.5's output.
    call_ends_it: bool,
}

impl ReasoningParser {
    /// A parser that has not read anything.
    pub fn new(start: ReasoningStart, call_ends_it: bool) -> Self {
        let step = match start {
            ReasoningStart::Never => Step::Content,
            ReasoningStart::IfOpened => Step::Start,
            ReasoningStart::Opened => Step::Opened,
        };
        Self { cursor: Cursor::default(), step, call_ends_it }
    }

    /// Whether the position is after `<think>` and before the end of `</think>`.
    pub fn is_inside(&self) -> bool {
        matches!(self.step, Step::Opened | Step::Reasoning)
    }

    /// Parses a delta of text; returns the part of it that is not reasoning.
    pub fn push(&mut self, delta: &str, out: &mut Output) -> String {
        self.cursor.text.push_str(delta);
        while let Some(step) = self.advance(out) {
            self.step = step;
        }
        if self.step != Step::Content {
            return String::new();
        }
        self.cursor.at = self.cursor.text.len();
        self.cursor.take()
    }

    /// Ends the text: returns the part of the held-back rest that is not reasoning.
    pub fn finish(&mut self, out: &mut Output) -> String {
        self.cursor.at = self.cursor.text.len();
        let held = self.cursor.take();
        match self.step {
            Step::Start => held,
            _ => {
                out.reasoning(&held);
                String::new()
            }
        }
    }

    /// The next step, or `None` if more text is needed.
    fn advance(&mut self, out: &mut Output) -> Option<Step> {
        match self.step {
            Step::Start => {
                self.cursor.skip_whitespace();
                match self.cursor.eat(OPEN) {
                    Next::Maybe => None,
                    Next::Yes => {
                        self.cursor.take();
                        Some(Step::Opened)
                    }
                    Next::No => {
                        self.cursor.at = 0;
                        Some(Step::Content)
                    }
                }
            }
            Step::Opened => self.skip_line_breaks().then_some(Step::Reasoning),
            Step::Reasoning => self.reasoning(out),
            Step::Closed => self.skip_line_breaks().then_some(Step::Content),
            Step::Content => None,
        }
    }

    /// Skips line breaks; true if other text follows.
    fn skip_line_breaks(&mut self) -> bool {
        self.cursor.at = self.cursor.text.len() - self.cursor.text.trim_start_matches('\n').len();
        self.cursor.take();
        !self.cursor.text.is_empty()
    }

    fn reasoning(&mut self, out: &mut Output) -> Option<Step> {
        let close = self.cursor.seek(CLOSE);
        let call = if self.call_ends_it { self.cursor.seek(CALL_OPEN) } else { close };
        match (close, call) {
            (_, Seek::Found(call)) if call < close.at() => match self.is_call(call) {
                Next::Yes => Some(self.end(call, 0, out)),
                Next::No => {
                    self.cursor.at = call + CALL_OPEN.len();
                    out.reasoning(&self.cursor.take());
                    Some(Step::Reasoning)
                }
                Next::Maybe => {
                    self.hold(call, out);
                    None
                }
            },
            (Seek::Found(close), _) => Some(self.end(close, CLOSE.len(), out)),
            (Seek::Pending(close), call) => {
                self.hold(close.min(call.at()), out);
                None
            }
        }
    }

    /// Whether the `<tool_call>` at this byte begins a call and is not just mentioned in the reasoning.
    fn is_call(&self, at: usize) -> Next {
        begins_after_space(&self.cursor.text[at + CALL_OPEN.len()..], FUNCTION)
    }

    /// Ends the reasoning at this byte, before a tag of this many bytes.
    fn end(&mut self, at: usize, tag: usize, out: &mut Output) -> Step {
        self.hold(at, out);
        self.cursor.at += tag;
        self.cursor.take();
        Step::Closed
    }

    /// Emits the text before this byte, except line breaks at its end.
    fn hold(&mut self, end: usize, out: &mut Output) {
        out.reasoning(&self.cursor.take_but(end, &['\n']));
    }
}
