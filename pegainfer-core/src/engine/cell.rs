//! One running engine: its queue and counters, and the start of its two threads.

use super::demux::Demultiplexer;
use super::engine_loop::EngineLoop;
use super::events::{Cancellation, EventSender};
use super::shared::{Command, EngineConfig, Shared, Submission};
use super::step_tokens::StepTokens;
use super::{EngineLimits, EngineStats, GenerateRequest, RequestId, StepEngine, SubmitError};
use crate::images;
use crate::kv::{BlockPool, PrefixRoot};
use crate::ledger::StepLog;
use crate::schedule::group;
use crate::schedule::recording::ScheduleSink;
use crate::sync::atomic::Ordering;
use crate::sync::queue::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{RecvTimeoutError, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;

/// Time that the last handle waits for the engine to stop.
const STOPS_WITHIN: Duration = Duration::from_secs(5);
/// Number of steps whose events may be queued before the engine waits for the demultiplexer.
const DEMUX_STEPS: usize = 64;

/// One running engine of an [`EngineHandle`](super::EngineHandle). It stops after the last handle is dropped and its
/// last request has ended.
pub struct EngineCell {
    commands: SyncSender<Command>,
    pub(super) shared: Arc<Shared>,
    /// Declared after `commands`, so that the engine sees its inbox close before the last handle waits.
    stopped: Arc<Stopped>,
}

/// A request on its way to an engine.
pub(super) struct Outgoing {
    pub id: RequestId,
    pub request: GenerateRequest,
    /// As in [`Submission`].
    pub uncomputed: Option<usize>,
    pub events: EventSender,
    pub cancellation: Arc<Cancellation>,
}

/// Disconnected once the engine is gone.
pub(super) struct Stopped(Mutex<Receiver<()>>);

impl Stopped {
    pub(super) fn wait(&self) {
        let stopped = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(STOPS_WITHIN) {
            log::warn!("the engine does not stop; leaving it running");
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        self.wait();
    }
}

impl EngineCell {
    /// Starts the engine thread and its demultiplexer.
    pub(super) fn spawn<E: StepEngine>(engine: E, config: EngineConfig) -> std::io::Result<Self> {
        let (cell, run_engine, run_demux) = Self::threads(engine, config);
        std::thread::Builder::new().name("demux".into()).spawn(run_demux)?;
        std::thread::Builder::new().name("engine".into()).spawn(run_engine)?;
        Ok(cell)
    }

    /// A cell and the closures that the engine thread and the demultiplexer thread run.
    pub(super) fn threads<E: StepEngine>(
        engine: E,
        config: EngineConfig,
    ) -> (Self, impl FnOnce() + Send + 'static, impl FnOnce() + Send + 'static) {
        let (cell, mut engine_loop, demux, running) = Self::connect(engine, config, DEMUX_STEPS);
        let run_engine = move || {
            if catch_unwind(AssertUnwindSafe(|| engine_loop.run())).is_err() {
                engine_loop.panicked();
            }
            // Drops the engine and the demultiplexer's sender; the latter closes every open stream.
            drop(engine_loop);
            drop(running);
        };
        (cell, run_engine, move || demux.run())
    }

    /// A cell, the loops of both threads, joined by a queue of `demux_capacity` messages, and the guard that is
    /// dropped when the engine is gone.
    pub(super) fn connect<E: StepEngine>(
        engine: E,
        config: EngineConfig,
        demux_capacity: usize,
    ) -> (Self, EngineLoop<E>, Demultiplexer, Sender<()>) {
        let (commands, inbox) = sync_channel(config.max_queued);
        let (demux, messages) = sync_channel(demux_capacity);
        let (running, stopped) = channel();
        let shared = Arc::new(Shared::new(&engine, config));
        let engine_loop = EngineLoop::new(engine, inbox, demux, shared.clone());
        let cell = Self { commands, shared, stopped: Arc::new(Stopped(Mutex::new(stopped))) };
        (cell, engine_loop, Demultiplexer::new(messages), running)
    }

    /// The receiver that is disconnected once the engine is gone.
    pub(super) fn stopped(&self) -> &Arc<Stopped> {
        &self.stopped
    }

    /// Queues a request that passed [`EngineLimits::check`]. Refused if the engine has stopped or its queue is full.
    pub(super) fn submit(&self, outgoing: Outgoing) -> Result<(), SubmitError> {
        if !self.is_alive() {
            return Err(SubmitError::EngineStopped);
        }
        if self.live() == 0 {
            // The deadline of a step starts with the work, not with the step before it.
            self.shared.stats().1 = self.shared.clock.now();
        }
        let queued = self.shared.live.fetch_add(1, Ordering::AcqRel);
        if queued >= self.shared.config.max_queued {
            self.shared.live.fetch_sub(1, Ordering::AcqRel);
            return Err(SubmitError::QueueFull { queued });
        }
        let Outgoing { id, request, uncomputed, events, cancellation } = outgoing;
        let group = group(request.tenant);
        let submission = Submission { id, request, uncomputed, events, cancellation };
        if let Some(tokens) = uncomputed {
            // Added first, because the engine may subtract it at once.
            self.shared.add_load(group, tokens);
        }
        self.send(Command::Submit(Box::new(submission))).inspect_err(|_| {
            if let Some(tokens) = uncomputed {
                self.shared.subtract_tokens(group, tokens);
                self.shared.subtract_request(group);
            }
            self.shared.live.fetch_sub(1, Ordering::AcqRel);
        })
    }

    /// Submitted requests that have not ended; none once the engine has stopped.
    pub(super) fn live(&self) -> usize {
        if self.is_alive() { self.shared.live.load(Ordering::Acquire) } else { 0 }
    }

    /// False once the engine has stopped.
    pub fn is_alive(&self) -> bool {
        self.shared.alive.load(Ordering::Acquire)
    }

    /// Number of leading tokens of `prompt` that are in the engine's prefix cache for requests of this root.
    pub fn cached_prefix(&self, root: impl Into<PrefixRoot>, prompt: &[u32]) -> usize {
        self.shared.pool.as_ref().map_or(0, |pool| pool.cached_prefix(root, prompt))
    }

    /// Variant of [`cached_prefix`](Self::cached_prefix) for the prompt of a request, with its images.
    pub(super) fn cached_tokens(&self, request: &GenerateRequest) -> usize {
        let Some(pool) = self.shared.pool.as_ref().filter(|_| !request.images.is_empty()) else {
            return self.cached_prefix(request.prefix_root(), &request.prompt);
        };
        let keys = images::keys(&request.images, &request.prompt, |hash| pool.image_number(hash));
        pool.cached_prefix(request.prefix_root(), &keys)
    }

    /// The engine's KV blocks; `None` if it keeps no cache.
    pub fn pool(&self) -> Option<&BlockPool> {
        self.shared.pool.as_ref()
    }

    /// Prompt tokens that are predicted to be computed before the open requests have their first tokens; 0 if the
    /// handle has one engine, for which nobody predicts them.
    pub fn predicted_tokens(&self) -> usize {
        self.shared.loads().values().map(|load| load.tokens).sum()
    }

    /// Starts to clear the prefix cache; blocks held by requests stay. The receiver is answered when it is done, after
    /// the step in flight at the latest.
    pub(super) fn reset_prefix_cache(&self) -> Result<oneshot::Receiver<()>, SubmitError> {
        let (done, waiting) = oneshot::channel();
        self.send(Command::ResetPrefixCache(done))?;
        Ok(waiting)
    }

    /// Sends every input of the schedule and every planned step to `sink` from now on. A recording can be replayed only
    /// if it starts before the first request; see [`recording`](crate::schedule::recording).
    pub fn record_schedule(&self, sink: Box<dyn ScheduleSink>) -> Result<(), SubmitError> {
        self.send(Command::RecordSchedule(sink))
    }

    fn send(&self, command: Command) -> Result<(), SubmitError> {
        self.commands.try_send(command).map_err(|e| match e {
            TrySendError::Full(_) => SubmitError::QueueFull { queued: self.shared.config.max_queued },
            TrySendError::Disconnected(_) => SubmitError::EngineStopped,
        })
    }

    /// Fixed properties of the engine.
    pub fn limits(&self) -> &EngineLimits {
        &self.shared.limits
    }

    /// Gauges and counters as of the last step. Requests submitted since count as waiting.
    pub fn stats(&self) -> EngineStats {
        let mut stats = self.shared.stats().0;
        let live = self.live();
        // A thread that panicked leaves its last numbers.
        stats.running = if self.is_alive() { stats.running } else { 0 };
        stats.waiting = live.saturating_sub(stats.running);
        stats
    }

    /// Histogram of the number of tokens in a step.
    pub fn step_tokens(&self) -> StepTokens {
        *self.shared.step_tokens()
    }

    /// Times of the engine's steps; `None` if the engine keeps none.
    pub fn step_log(&self) -> Option<&StepLog> {
        self.shared.step_log.as_deref()
    }

    /// Reason why the engine has stopped, after a fatal error or a panic, as a sentence.
    pub fn failure(&self) -> Option<&str> {
        self.shared.failure.get().map(String::as_str)
    }

    /// False once the engine has stopped, and while a step with work to do exceeds its deadline.
    pub fn is_healthy(&self) -> bool {
        let idle = self.live() == 0;
        let last_step = self.shared.stats().1;
        let since = self.shared.clock.now().saturating_duration_since(last_step);
        self.is_alive() && (idle || since < self.shared.config.step_deadline)
    }
}
