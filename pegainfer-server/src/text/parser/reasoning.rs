//! `<think>` reasoning `</think>` answer.

use super::cursor::{Cursor, Next, Seek, begins_after_space};
use super::output::Output;
use super::qwen3_coder::FUNCTION;
use super::tools::{CALL_OPEN, ToolFormat};

/// Opens the reasoning.
pub const OPEN: &str = "<think>";
/// Ends it.
pub const CLOSE: &str = "</think>";

/// What is known about reasoning before the first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningStart {
    /// There is none to look for.
    Never,
    /// The model opens it if it wants to.
    IfOpened,
    /// The prompt has opened it.
    Opened,
}

impl ReasoningStart {
    /// Reads it off the end of the prompt of a model that reasons.
    pub fn after(prompt: &str) -> Self {
        if prompt.trim_end().ends_with(OPEN) { Self::Opened } else { Self::IfOpened }
    }

    /// Whether reasoning can follow this prompt: not where it goes on with an answer, nor where it holds an empty one, as
    /// templates write it that were told not to reason.
    pub fn may_follow(self, prompt: &str, continued: bool) -> bool {
        self == Self::Opened || (self == Self::IfOpened && !continued && !prompt.trim_end().ends_with(CLOSE))
    }

    /// What ends the reasoning that the prompt opened, written as the templates of this format write an empty one.
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
    /// Before `<think>`, if it comes.
    Start,
    /// Line breaks after `<think>`.
    Opened,
    Reasoning,
    /// Line breaks after `</think>`.
    Closed,
    Answer,
}

/// Splits reasoning from the answer. The line breaks next to the tags belong to neither.
pub struct ReasoningParser {
    cursor: Cursor,
    step: Step,
    /// Qwen3.5 may begin a call without closing its reasoning.
    call_ends_it: bool,
}

impl ReasoningParser {
    /// Nothing read yet.
    pub fn new(start: ReasoningStart, call_ends_it: bool) -> Self {
        let step = match start {
            ReasoningStart::Never => Step::Answer,
            ReasoningStart::IfOpened => Step::Start,
            ReasoningStart::Opened => Step::Opened,
        };
        Self { cursor: Cursor::default(), step, call_ends_it }
    }

    /// True after `<think>` and before the end of `</think>`.
    pub fn is_inside(&self) -> bool {
        matches!(self.step, Step::Opened | Step::Reasoning)
    }

    /// Takes a piece of text; gives the part of it that belongs to the answer.
    pub fn push(&mut self, piece: &str, out: &mut Output) -> String {
        self.cursor.text.push_str(piece);
        while let Some(step) = self.advance(out) {
            self.step = step;
        }
        if self.step != Step::Answer {
            return String::new();
        }
        self.cursor.at = self.cursor.text.len();
        self.cursor.take()
    }

    /// What was held back, when no more text follows: gives the part of it that belongs to the answer.
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

    /// The next step, or `None` when that takes more text.
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
                        Some(Step::Answer)
                    }
                }
            }
            Step::Opened => self.skip_line_breaks().then_some(Step::Reasoning),
            Step::Reasoning => self.reasoning(out),
            Step::Closed => self.skip_line_breaks().then_some(Step::Answer),
            Step::Answer => None,
        }
    }

    /// True when something else follows.
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

    /// Whether the `<tool_call>` at this byte begins a call and is not just mentioned.
    fn is_call(&self, at: usize) -> Next {
        begins_after_space(&self.cursor.text[at + CALL_OPEN.len()..], FUNCTION)
    }

    /// The reasoning ends at this byte, before a tag of so many bytes.
    fn end(&mut self, at: usize, tag: usize, out: &mut Output) -> Step {
        self.hold(at, out);
        self.cursor.at += tag;
        self.cursor.take();
        Step::Closed
    }

    /// Gives the text before this byte out, but for line breaks at its end.
    fn hold(&mut self, end: usize, out: &mut Output) {
        out.reasoning(&self.cursor.take_but(end, &['\n']));
    }
}
