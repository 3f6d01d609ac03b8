//! Splits reasoning (`<think>` … `</think>`) from the content after it.
//!
//! A call inside the reasoning is a draft if other text follows it, even after `</think>`; it then stays reasoning. It
//! is a real call if the output ends after it, with or without `</think>`. The text from such a call on is held back
//! until this is known.

use super::call_start::{CallSearch, Found};
use super::cursor::{Cursor, Next, Seek};
use super::format::ToolFormat;
use super::output::EventCollector;
use super::tools::ToolParser;
use serde::{Deserialize, Serialize};

/// Opening tag of the reasoning.
pub const OPEN: &str = "<think>";
/// Closing tag of the reasoning.
pub const CLOSE: &str = "</think>";

/// How the prompt starts reasoning in the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReasoningStart {
    /// There is no reasoning.
    Never,
    /// The model may open it.
    IfOpened,
    /// The prompt opened it.
    Opened,
}

impl ReasoningStart {
    /// Detects it from the end of the prompt, for a model that reasons.
    pub fn after(prompt: &str) -> Self {
        if prompt.trim_end().ends_with(OPEN) { Self::Opened } else { Self::IfOpened }
    }

    /// True if reasoning can follow this prompt. It cannot if the prompt continues a message, or ends with an empty
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

enum Step {
    /// Before an optional `<think>`.
    Start,
    /// Line breaks after `<think>`.
    Opened,
    Reasoning,
    /// In text that may be a call or a draft.
    Draft(Box<Draft>),
    /// Line breaks after `</think>`.
    Closed,
    Content,
}

/// Text that may be a call; it stays in the cursor.
struct Draft {
    parser: ToolParser,
    /// Position of the `</think>` after it.
    closed: Option<usize>,
}

/// Splits reasoning from content. The line breaks next to the tags belong to neither.
pub struct ReasoningParser {
    cursor: Cursor,
    step: Step,
    /// Search for calls before `</think>`; `None` if there are no calls.
    search: Option<CallSearch>,
}

impl ReasoningParser {
    /// A parser at the start of the output.
    pub fn new(start: ReasoningStart, search: Option<CallSearch>) -> Self {
        let step = match start {
            ReasoningStart::Never => Step::Content,
            ReasoningStart::IfOpened => Step::Start,
            ReasoningStart::Opened => Step::Opened,
        };
        // A bare JSON object inside the reasoning is hardly ever meant as a call.
        let search = search.map(|search| CallSearch { bare_json: false, ..search });
        Self { cursor: Cursor::default(), step, search }
    }

    /// True if the position is after `<think>` and before the end of `</think>`.
    pub fn is_inside(&self) -> bool {
        matches!(self.step, Step::Opened | Step::Reasoning)
    }

    /// True in or after text that may be a call. At the end of the text, true if it was one.
    pub fn is_in_draft(&self) -> bool {
        matches!(self.step, Step::Draft(_))
    }

    /// Parses a delta of text and returns its part outside the reasoning.
    pub fn push(&mut self, delta: &str, out: &mut EventCollector) -> String {
        self.cursor.text.push_str(delta);
        while self.advance(out) {}
        if !matches!(self.step, Step::Content) {
            return String::new();
        }
        self.cursor.at = self.cursor.text.len();
        self.cursor.take()
    }

    /// Ends the text: returns the part of the held-back text outside the reasoning.
    pub fn finish(&mut self, out: &mut EventCollector) -> String {
        self.cursor.ended = true;
        while self.advance(out) {}
        if let Step::Draft(draft) = &mut self.step {
            draft.parser.finish(out);
            if out.trial_has_calls() {
                out.accept_trial();
                return String::new();
            }
            out.reject_trial();
            self.step = Step::Reasoning;
        }
        self.cursor.at = self.cursor.text.len();
        let held = self.cursor.take();
        if matches!(self.step, Step::Start | Step::Content) {
            return held;
        }
        out.reasoning(&held);
        String::new()
    }

    /// Takes one step; false if more text is needed.
    fn advance(&mut self, out: &mut EventCollector) -> bool {
        match &mut self.step {
            Step::Start => {
                self.cursor.skip_whitespace();
                match self.cursor.eat(OPEN) {
                    Next::Maybe => return false,
                    Next::Yes => {
                        self.cursor.take();
                        self.step = Step::Opened;
                    }
                    Next::No => {
                        self.cursor.at = 0;
                        self.step = Step::Content;
                    }
                }
                true
            }
            Step::Opened => self.skip_line_breaks(Step::Reasoning),
            Step::Reasoning => self.reasoning(out),
            Step::Draft(draft) if draft.closed.is_some() => self.after_draft(out),
            Step::Draft(_) => self.draft(out),
            Step::Closed => self.skip_line_breaks(Step::Content),
            Step::Content => false,
        }
    }

    /// Skips line breaks; true if other text follows, where the next step begins.
    fn skip_line_breaks(&mut self, next: Step) -> bool {
        self.cursor.at = self.cursor.text.len() - self.cursor.text.trim_start_matches('\n').len();
        self.cursor.take();
        if self.cursor.text.is_empty() {
            return false;
        }
        self.step = next;
        true
    }

    fn reasoning(&mut self, out: &mut EventCollector) -> bool {
        let close = self.cursor.seek(CLOSE);
        let call = self.search.as_ref().map_or(Found::NotBefore(self.cursor.text.len()), |s| s.find(&self.cursor));
        match (close, call) {
            (_, Found::At(call, _)) if call < close.at() => {
                self.hold(call, out);
                self.begin_draft(out);
                true
            }
            // Something unknown may begin before the tag, but nothing can contain the tag.
            (Seek::Found(close), _) => {
                self.end(close, out);
                true
            }
            (Seek::Pending(close), Found::At(call, _) | Found::NotBefore(call)) => {
                self.hold(close.min(call), out);
                false
            }
        }
    }

    /// Begins a possible call at the position.
    fn begin_draft(&mut self, out: &mut EventCollector) {
        if let Some(search) = &self.search {
            out.begin_trial();
            let parser = ToolParser::continuing(search.clone(), &self.cursor, self.cursor.at);
            self.step = Step::Draft(Box::new(Draft { parser, closed: None }));
        }
    }

    /// Parses a possible call one character at a time, so that it ends at the same place for all cuts of the text.
    fn draft(&mut self, out: &mut EventCollector) -> bool {
        let Step::Draft(draft) = &mut self.step else { return true };
        let mut close = self.cursor.seek(CLOSE);
        if self.cursor.ended && close == Seek::Pending(self.cursor.text.len()) {
            // A closing tag that is cut off does not count as text after the call.
            let cut = self.cursor.text.rfind('<').filter(|&at| CLOSE.starts_with(&self.cursor.text[at..]));
            close = Seek::Pending(cut.unwrap_or(self.cursor.text.len()));
        }
        while self.cursor.at < close.at() {
            let start = self.cursor.at;
            self.cursor.skip_char();
            draft.parser.push(&self.cursor.text[start..self.cursor.at], out);
            if out.trial_has_content() {
                let end = self.cursor.at - draft.parser.held();
                self.reject(end, out);
                return true;
            }
        }
        match close {
            Seek::Pending(_) => false,
            Seek::Found(at) if out.trial_has_calls() => {
                draft.closed = Some(at);
                self.cursor.at += CLOSE.len();
                true
            }
            Seek::Found(at) => {
                self.reject(at, out);
                true
            }
        }
    }

    /// After a call and `</think>`: more text shows that the call is a draft.
    fn after_draft(&mut self, out: &mut EventCollector) -> bool {
        self.cursor.skip_whitespace();
        let Step::Draft(draft) = &self.step else { return true };
        let Some(closed) = draft.closed.filter(|_| !self.cursor.rest().is_empty()) else { return false };
        self.reject(closed, out);
        true
    }

    /// Marks the parsed text as a draft: the text before `end` is reasoning.
    fn reject(&mut self, end: usize, out: &mut EventCollector) {
        out.reject_trial();
        self.cursor.at = 0;
        self.step = Step::Reasoning;
        self.hold(end, out);
    }

    /// Ends the reasoning at `</think>`, which begins at byte `at`.
    fn end(&mut self, at: usize, out: &mut EventCollector) {
        self.hold(at, out);
        self.cursor.at += CLOSE.len();
        self.cursor.take();
        self.step = Step::Closed;
    }

    /// Emits the text before `end`, except line breaks at its end.
    fn hold(&mut self, end: usize, out: &mut EventCollector) {
        out.reasoning(&self.cursor.take_but(end, &['\n']));
    }
}
