//! What the handles of an engine and its thread share.

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
    /// Requests that may be queued or running at once; one more is refused with `QueueFull`.
    pub max_queued: usize,
    /// An engine that has work and neither launches nor finishes a step for this long counts as stuck.
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

/// What handles ask of the engine thread.
pub(super) enum Command {
    Submit(Submission),
    /// Answered when it is done.
    ResetPrefixCache(oneshot::Sender<()>),
    RecordSchedule(Box<dyn ScheduleSink>),
}

/// Written by the engine thread and by handles, read by handles.
pub(super) struct Shared {
    pub limits: EngineLimits,
    pub config: EngineConfig,
    /// The engine's, so that handles and engine agree on how long a step takes.
    pub clock: Clock,
    /// Requests submitted and not ended.
    pub live: AtomicUsize,
    pub next_id: AtomicU64,
    /// False once the engine has stopped.
    pub alive: AtomicBool,
    /// Why it has stopped, if an error is the reason.
    pub failure: OnceLock<String>,
    stats: Mutex<(EngineStats, Instant)>,
    step_tokens: Mutex<StepTokens>,
    /// Times of the steps, where the engine keeps them.
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

    /// Gauges and counters, and when the engine was last seen to go on.
    pub(super) fn stats(&self) -> MutexGuard<'_, (EngineStats, Instant)> {
        // The guarded value is plain data: a panic elsewhere cannot leave it half-written.
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tokens of the steps so far.
    pub(super) fn step_tokens(&self) -> MutexGuard<'_, StepTokens> {
        self.step_tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
