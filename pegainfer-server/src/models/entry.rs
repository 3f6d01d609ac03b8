//! The state of one name.

use super::error::LoadError;
use super::lease::Lease;
use super::model::{Model, Text};
use super::spec::ModelSpec;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::oneshot;

/// A model that could not be loaded is not tried again for this long.
const RETRY: Duration = Duration::from_secs(5);

/// A model takes new requests for at least this long, before those for another model make it leave.
const STAY: Duration = Duration::from_secs(1);

/// How long a model stays without requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepAlive {
    /// For this long; not at all if it is zero.
    For(Duration),
    /// Until others need its memory.
    Always,
}

/// Where a model is.
pub(super) enum State {
    /// Only on disk.
    Unloaded,
    /// Its engine is not in memory, its text side is.
    Sleeping(Box<Text>),
    /// It is being loaded, or waits for memory.
    Loading,
    /// It serves requests.
    Loaded(Arc<Model>),
    /// Its engine is being stopped.
    Leaving,
    /// It could not be loaded, or its engine has stopped.
    Failed { error: LoadError, at: Instant },
}

/// A name, and its model's state.
pub(super) struct Entry {
    pub spec: ModelSpec,
    pub state: State,
    /// Leases.
    pub uses: usize,
    /// True if new requests wait until it has left.
    pub is_closed: bool,
    /// Requests that wait for it.
    pub waiters: Vec<oneshot::Sender<Result<Lease, LoadError>>>,
    /// True if it is loaded even without a waiter.
    pub is_wanted: bool,
    /// Memory that it takes, or is about to take.
    pub bytes: u64,
    /// End of the last use.
    pub last_use: Instant,
    /// The same, for clients.
    pub last_used: Option<SystemTime>,
    /// Idle time that a request asked for.
    pub keep_alive: Option<KeepAlive>,
    /// When it was loaded, and how long that took.
    pub loaded_at: Instant,
    pub load_time: Duration,
    /// Context of the model when it was last in memory.
    pub max_model_len: Option<usize>,
    /// What it is for, see [`Task::name`](crate::text_service::Task::name); `None` before it was loaded once.
    pub task: Option<&'static str>,
    /// What it reads; `None` before it was loaded once.
    pub input_modalities: Option<&'static [&'static str]>,
}

impl Entry {
    /// A model that is not in memory.
    pub fn new(spec: ModelSpec) -> Self {
        Self {
            spec,
            state: State::Unloaded,
            uses: 0,
            is_closed: false,
            waiters: Vec::new(),
            is_wanted: false,
            bytes: 0,
            last_use: Instant::now(),
            last_used: None,
            keep_alive: None,
            loaded_at: Instant::now(),
            load_time: Duration::ZERO,
            max_model_len: None,
            task: None,
            input_modalities: None,
        }
    }

    /// The canonical name.
    pub fn name(&self) -> &str {
        &self.spec.names[0]
    }

    /// The model, if it is in memory.
    pub fn model(&self) -> Option<Arc<Model>> {
        match &self.state {
            State::Loaded(model) => Some(model.clone()),
            _ => None,
        }
    }

    /// The model, if it takes new requests.
    pub fn available(&self) -> Option<Arc<Model>> {
        self.model().filter(|_| !self.is_closed)
    }

    /// True if an adapter of the model has this name.
    pub fn has_adapter(&self, name: &str) -> bool {
        let loaded = match &self.state {
            State::Loaded(model) => model.adapters.as_ref().is_some_and(|adapters| adapters.has(name)),
            _ => false,
        };
        loaded || self.spec.adapters.iter().any(|own| own == name)
    }

    /// Why it could not be loaded a moment ago.
    pub fn recent_failure(&self) -> Option<LoadError> {
        match &self.state {
            State::Failed { error, at } if at.elapsed() < RETRY => Some(error.clone()),
            _ => None,
        }
    }

    /// Marks it as being loaded, and returns the text side that it kept. `None` if it is being loaded already, or has
    /// to leave first.
    pub fn begin_loading(&mut self) -> Option<Option<Box<Text>>> {
        match self.state {
            State::Unloaded | State::Sleeping(_) | State::Failed { .. } => {}
            State::Loading | State::Loaded(_) | State::Leaving => return None,
        }
        match std::mem::replace(&mut self.state, State::Loading) {
            State::Sleeping(text) => Some(Some(text)),
            _ => Some(None),
        }
    }

    /// True if nobody waits for it any more.
    pub fn is_abandoned(&self) -> bool {
        !self.is_wanted && self.waiters.iter().all(oneshot::Sender::is_closed)
    }

    /// True if it is in memory and may leave at once.
    pub fn is_idle(&self) -> bool {
        matches!(self.state, State::Loaded(_)) && !self.spec.pinned && self.uses == 0
    }

    /// True if it has been in memory for as long as loading took, and for [`STAY`].
    pub fn has_stayed(&self) -> bool {
        self.loaded_at.elapsed() >= self.load_time.max(STAY)
    }

    /// True if it is in memory and may leave when its requests have ended.
    pub fn may_leave(&self) -> bool {
        matches!(self.state, State::Loaded(_)) && !self.spec.pinned
    }

    /// The model is in memory.
    pub fn loaded(&mut self, model: Arc<Model>) {
        self.max_model_len = Some(model.engine.limits().max_model_len);
        self.task = Some(model.text.checkpoint.task.name());
        self.input_modalities = Some(model.text.input_modalities());
        self.state = State::Loaded(model);
        (self.is_closed, self.is_wanted) = (false, false);
        (self.last_use, self.loaded_at) = (Instant::now(), Instant::now());
    }

    /// Ends a use.
    pub fn release(&mut self, is_use: bool) {
        self.uses = self.uses.saturating_sub(1);
        if is_use {
            (self.last_use, self.last_used) = (Instant::now(), Some(SystemTime::now()));
        }
    }
}
