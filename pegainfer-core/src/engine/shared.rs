//! State shared by an engine's handles and its thread.

use super::clock::Clock;
use super::step_tokens::StepTokens;
use super::stream::{Cancellation, EventSender};
use super::{EngineLimits, EngineStats, GenerateRequest, RequestId, StepEngine};
use crate::ledger::StepLog;
use crate::schedule::recording::ScheduleSink;
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use crate::sync::{Mutex, MutexGuard};
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Bounds of the engine's queues and steps.
#[derive(Debug, Clone, Copy)]
pub struct EngineConfig {
    /// Maximum number of queued and running requests; others are refused with `QueueFull`.
    pub max_queued: usize,
    /// Time after which an engine with work that neither launches nor finishes a step counts as stuck.
    pub step_deadline: Duration,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self { max_queued: 1024, step_deadline: Duration::from_secs(30) }
    }
}

/// A request on its way to the engine thread.
pub(super) struct Submission {
    pub id: RequestId,
    pub request: GenerateRequest,
    pub events: EventSender,
    pub cancellation: Arc<Cancellation>,
}

/// Commands from handles to the engine thread.
pub(super) enum Command {
    Submit(Submission),
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
    pub next_id: AtomicU64,
    /// False once the engine has stopped.
    pub alive: AtomicBool,
    /// Reason of the stop, if it is an error.
    pub failure: OnceLock<String>,
    stats: Mutex<(EngineStats, Instant)>,
    step_tokens: Mutex<StepTokens>,
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
            next_id: AtomicU64::new(0),
            alive: AtomicBool::new(true),
            failure: OnceLock::new(),
            step_tokens: Mutex::new(StepTokens::default()),
            step_log: engine.step_log(),
        }
    }

    /// Gauges and counters, and the time of the engine's last sign of progress.
    pub(super) fn stats(&self) -> MutexGuard<'_, (EngineStats, Instant)> {
        // The guarded value is plain data: a panic elsewhere cannot leave it half-written.
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Histogram of tokens per step.
    pub(super) fn step_tokens(&self) -> MutexGuard<'_, StepTokens> {
        self.step_tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
