//! State shared by an engine's handles and its thread.

use super::clock::Clock;
use super::events::{Cancellation, EventSender};
use super::router::GroupLoad;
use super::step_tokens::StepTokens;
use super::{EngineLimits, EngineStats, GenerateRequest, RequestId, StepEngine};
use crate::kv::BlockPool;
use crate::ledger::StepLog;
use crate::schedule::recording::ScheduleSink;
use crate::sync::atomic::{AtomicBool, AtomicUsize};
use crate::sync::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Bounds of the engine's queues and steps.
#[derive(Debug, Clone, Copy)]
pub struct EngineConfig {
    /// Maximum number of queued and running requests, of all engines of a handle together; others are refused with
    /// `QueueFull`.
    pub max_queued: usize,
    /// Time after which an engine with work that neither launches nor finishes a step counts as stuck.
    pub step_deadline: Duration,
    /// For tests: what the device does after some steps.
    pub fault: Option<Fault>,
}

/// A fault of the device, for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Number of steps before it.
    pub after: u64,
    /// What happens.
    pub kind: FaultKind,
}

/// What a device does that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// Every later step fails.
    Lost,
    /// The next step never ends.
    Stuck,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self { max_queued: 1024, step_deadline: Duration::from_secs(30), fault: None }
    }
}

/// A request on its way to the engine thread.
pub(super) struct Submission {
    pub id: RequestId,
    pub request: GenerateRequest,
    /// Prompt tokens that it is predicted to compute; `None` if the handle has one engine.
    pub uncomputed: Option<usize>,
    pub events: EventSender,
    pub cancellation: Arc<Cancellation>,
}

/// Commands from handles to the engine thread.
pub(super) enum Command {
    Submit(Box<Submission>),
    /// The sender is answered when the cache is empty.
    ResetPrefixCache(oneshot::Sender<()>),
    RecordSchedule(Box<dyn ScheduleSink>),
}

/// Written by the engine thread and by handles, read by handles.
pub(super) struct Shared {
    pub limits: EngineLimits,
    pub config: EngineConfig,
    /// The engine's clock, so that handles and engine agree on step times.
    pub clock: Clock,
    /// Submitted requests that have not ended.
    pub live: AtomicUsize,
    /// False once the engine has stopped.
    pub alive: AtomicBool,
    /// Reason of the stop, if it is an error.
    pub failure: OnceLock<String>,
    stats: Mutex<(EngineStats, Instant)>,
    step_tokens: Mutex<StepTokens>,
    /// Load of each group of tenants. Empty if the handle has one engine.
    loads: Mutex<BTreeMap<u32, GroupLoad>>,
    /// The engine's KV pool, for looking into its prefix cache; `None` if it has none.
    pub pool: Option<BlockPool>,
    /// Step times; `None` if the engine keeps none.
    pub step_log: Option<Arc<StepLog>>,
}

impl Shared {
    pub(super) fn new(engine: &impl StepEngine, config: EngineConfig) -> Self {
        let clock = engine.clock();
        Self {
            stats: Mutex::new((engine.stats(), clock.now())),
            limits: engine.limits(),
            config,
            clock,
            live: AtomicUsize::new(0),
            alive: AtomicBool::new(true),
            failure: OnceLock::new(),
            step_tokens: Mutex::new(StepTokens::default()),
            loads: Mutex::new(BTreeMap::new()),
            pool: engine.pool(),
            step_log: engine.step_log(),
        }
    }

    /// Gauges and counters, and the time of the engine's last sign of progress.
    pub(super) fn stats(&self) -> MutexGuard<'_, (EngineStats, Instant)> {
        // The guarded value is plain data: a panic elsewhere cannot leave it half-written.
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request of a group, and the prompt tokens that it is predicted to compute.
    pub(super) fn add_load(&self, group: u32, tokens: usize) {
        let mut loads = self.loads();
        let load = loads.entry(group).or_default();
        (load.requests, load.tokens) = (load.requests + 1, load.tokens + tokens);
    }

    /// Subtracts prompt tokens of a group: the request has its first token, or ends.
    pub(super) fn subtract_tokens(&self, group: u32, tokens: usize) {
        if let Some(load) = self.loads().get_mut(&group) {
            load.tokens = load.tokens.saturating_sub(tokens);
        }
    }

    /// Subtracts a request of a group.
    pub(super) fn subtract_request(&self, group: u32) {
        if let Entry::Occupied(mut load) = self.loads().entry(group) {
            load.get_mut().requests -= 1;
            if load.get().requests == 0 {
                load.remove();
            }
        }
    }

    /// Load of each group of tenants with a request.
    pub(super) fn loads(&self) -> MutexGuard<'_, BTreeMap<u32, GroupLoad>> {
        self.loads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Histogram of tokens per step.
    pub(super) fn step_tokens(&self) -> MutexGuard<'_, StepTokens> {
        self.step_tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
