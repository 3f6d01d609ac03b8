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
    /// A tool call ends. Between its start and end there are only its own arguments, which together are one JSON
    /// object.
    ToolEnd {
        /// Index of the call.
        index: usize,
        /// False if the model's turn ended inside the call: the arguments hold only complete values.
        complete: bool,
    },
}

/// Collects events and joins neighbouring deltas of the same kind. Between the start and the end of a call it emits
/// only the call's arguments.
pub struct EventCollector {
    events: Vec<Event>,
    include_reasoning: bool,
    /// Number of calls so far, including dropped ones.
    pub calls: usize,
    max_calls: usize,
    id_seed: u64,
    /// True if a call has begun and not ended.
    open: bool,
    /// Text inside the open call that belongs to no parameter. It becomes content after the call.
    stray: String,
    /// True if the last content was stray text: the next content begins on a new line.
    after_stray: bool,
    has_content: bool,
    trial: Option<BeforeTrial>,
}

/// State before a trial.
struct BeforeTrial {
    events: Vec<Event>,
    calls: usize,
    has_content: bool,
    after_stray: bool,
}

impl EventCollector {
    pub fn new(include_reasoning: bool, max_calls: usize, id_seed: u64) -> Self {
        Self {
            events: Vec::new(),
            include_reasoning,
            calls: 0,
            max_calls,
            id_seed,
            open: false,
            stray: String::new(),
            after_stray: false,
            has_content: false,
            trial: None,
        }
    }

    /// Removes and returns the events that are certain.
    pub fn take(&mut self) -> Vec<Event> {
        std::mem::take(self.trial.as_mut().map_or(&mut self.events, |before| &mut before.events))
    }

    /// Starts a trial: its events are emitted only if it is accepted.
    pub fn begin_trial(&mut self) {
        self.trial = Some(BeforeTrial {
            events: std::mem::take(&mut self.events),
            calls: self.calls,
            has_content: self.has_content,
            after_stray: self.after_stray,
        });
    }

    /// True if the trial has found content.
    pub fn trial_has_content(&self) -> bool {
        self.trial.is_some() && self.events.iter().any(|event| matches!(event, Event::Content(_)))
    }

    /// True if the trial has found a call, and all its calls have ended.
    pub fn trial_has_calls(&self) -> bool {
        self.trial.as_ref().is_some_and(|before| self.calls > before.calls) && !self.open
    }

    /// Emits the events of the trial.
    pub fn accept_trial(&mut self) {
        if let Some(before) = self.trial.take() {
            let tried = std::mem::replace(&mut self.events, before.events);
            self.events.extend(tried);
        }
    }

    /// Drops the events of the trial.
    pub fn reject_trial(&mut self) {
        if let Some(before) = self.trial.take() {
            (self.events, self.calls) = (before.events, before.calls);
            (self.has_content, self.after_stray) = (before.has_content, before.after_stray);
            self.open = false;
            self.stray.clear();
        }
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
        self.has_content = true;
        if std::mem::take(&mut self.after_stray) && !text.starts_with('\n') {
            self.content("\n");
        }
        match self.events.last_mut() {
            Some(Event::Content(last)) => last.push_str(text),
            _ => self.events.push(Event::Content(text.to_string())),
        }
    }

    /// Starts a call, and ends one that is still open.
    pub fn tool_start(&mut self, name: &str) {
        self.tool_end(true);
        self.calls += 1;
        self.open = true;
        if self.calls <= self.max_calls {
            let index = self.calls - 1;
            let id = format!("call_{:016x}{index:08x}", self.id_seed);
            self.events.push(Event::ToolStart { index, id, name: name.to_string() });
        }
    }

    /// Appends arguments of the open call.
    pub fn tool_arguments(&mut self, text: &str) {
        debug_assert!(self.open, "arguments outside a call: {text}");
        if text.is_empty() || self.calls > self.max_calls {
            return;
        }
        match self.events.last_mut() {
            Some(Event::ToolArguments { delta, .. }) => delta.push_str(text),
            _ => self.events.push(Event::ToolArguments { index: self.calls - 1, delta: text.to_string() }),
        }
    }

    /// Holds back text that belongs to no parameter of the open call.
    pub fn stray(&mut self, text: &str) {
        self.stray.push_str(text);
    }

    /// Ends the open call, if there is one, and emits the stray text in it.
    pub fn tool_end(&mut self, complete: bool) {
        if !std::mem::take(&mut self.open) {
            return;
        }
        let stray = std::mem::take(&mut self.stray);
        if self.calls > self.max_calls {
            return;
        }
        self.events.push(Event::ToolEnd { index: self.calls - 1, complete });
        let stray = stray.trim();
        if !stray.is_empty() {
            self.after_stray |= self.has_content;
            self.content(stray);
            self.after_stray = true;
        }
    }
}
