//! Events of the output parser.

/// A part of the model's output, in the order it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// More reasoning text.
    Reasoning(String),
    /// More content.
    Content(String),
    /// A tool call begins.
    ToolStart {
        /// Index of the call, from 0.
        index: usize,
        /// Id of the call: `call_` and 24 hexadecimal digits.
        id: String,
        /// Name of the function.
        name: String,
    },
    /// More of a call's arguments.
    ToolArguments {
        /// Index of the call.
        index: usize,
        /// The next part of a JSON object.
        delta: String,
    },
    /// A tool call ends. Between start and end of a call come only its own arguments, which together are one JSON object.
    ToolEnd {
        /// Index of the call.
        index: usize,
        /// False if the model's turn ended inside the call: the arguments hold only what was whole.
        complete: bool,
    },
}

/// Collects events; neighbouring deltas of the same kind are joined.
pub struct Output {
    events: Vec<Event>,
    include_reasoning: bool,
    /// Number of calls so far, including dropped ones.
    pub calls: usize,
    max_calls: usize,
    id_seed: u64,
}

impl Output {
    pub fn new(include_reasoning: bool, max_calls: usize, id_seed: u64) -> Self {
        Self { events: Vec::new(), include_reasoning, calls: 0, max_calls, id_seed }
    }

    pub fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    pub fn reasoning(&mut self, text: &str) {
        if text.is_empty() || !self.include_reasoning {
            return;
        }
        match self.events.last_mut() {
            Some(Event::Reasoning(last)) => last.push_str(text),
            _ => self.events.push(Event::Reasoning(text.to_string())),
        }
    }

    pub fn content(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match self.events.last_mut() {
            Some(Event::Content(last)) => last.push_str(text),
            _ => self.events.push(Event::Content(text.to_string())),
        }
    }

    pub fn tool_start(&mut self, name: &str) {
        self.calls += 1;
        if self.calls <= self.max_calls {
            let index = self.calls - 1;
            let id = format!("call_{:016x}{index:08x}", self.id_seed);
            self.events.push(Event::ToolStart { index, id, name: name.to_string() });
        }
    }

    /// Appends arguments of the call that began last.
    pub fn tool_arguments(&mut self, text: &str) {
        if text.is_empty() || self.calls > self.max_calls {
            return;
        }
        match self.events.last_mut() {
            Some(Event::ToolArguments { delta, .. }) => delta.push_str(text),
            _ => self.events.push(Event::ToolArguments { index: self.calls - 1, delta: text.to_string() }),
        }
    }
}
