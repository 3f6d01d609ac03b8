//! Handles through which the server reaches an engine, and the start of the engine's two threads.

use super::demux::Demultiplexer;
use super::engine_loop::EngineLoop;
use super::shared::{Command, EngineConfig, Shared, Submission};
use super::step_tokens::StepTokens;
use super::{EngineLimits, EngineStats, GenerateRequest, RequestId, StepEngine, SubmitError, TokenStream};
use crate::ledger::StepLog;
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

/// A cheap, cloneable handle of a running engine. The engine stops after the last handle is dropped and the last
/// request has ended. Dropping the last handle waits a few seconds for that, so that the process does not exit while
/// the engine still releases its device.
#[derive(Clone)]
pub struct EngineHandle {
    commands: SyncSender<Command>,
    shared: Arc<Shared>,
    /// Declared after `commands`, so that the engine sees its inbox close before the last handle waits.
    stopped: Arc<Stopped>,
}

/// Disconnected once the engine is gone.
struct Stopped(Mutex<Receiver<()>>);

impl Stopped {
    fn wait(&self) {
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

/// Waits for the end of an engine without keeping it running.
pub struct EngineEnd(Arc<Stopped>);

impl EngineEnd {
    /// Waits until the last handle is dropped, on any thread, and the engine has released its device; gives up after a
    /// few seconds. A process that exits earlier may crash while the driver is still being closed.
    pub fn wait(&self) {
        self.0.wait();
    }
}

impl EngineHandle {
    /// Starts the engine thread and its demultiplexer.
    pub fn spawn<E: StepEngine>(engine: E, config: EngineConfig) -> std::io::Result<Self> {
        let (handle, run_engine, run_demux) = Self::threads(engine, config);
        std::thread::Builder::new().name("demux".into()).spawn(run_demux)?;
        std::thread::Builder::new().name("engine".into()).spawn(run_engine)?;
        Ok(handle)
    }

    /// A handle and the closures that the engine thread and the demultiplexer thread run.
    pub(super) fn threads<E: StepEngine>(
        engine: E,
        config: EngineConfig,
    ) -> (Self, impl FnOnce() + Send + 'static, impl FnOnce() + Send + 'static) {
        let (handle, mut engine_loop, demux, running) = Self::connect(engine, config, DEMUX_STEPS);
        let run_engine = move || {
            if catch_unwind(AssertUnwindSafe(|| engine_loop.run())).is_err() {
                engine_loop.panicked();
            }
            // Drops the engine and the demultiplexer's sender; the latter closes every open stream.
            drop(engine_loop);
            drop(running);
        };
        (handle, run_engine, move || demux.run())
    }

    /// A handle, the closures of both threads, joined by a queue of `demux_capacity` messages, and the guard that is
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
        let handle = Self { commands, shared, stopped: Arc::new(Stopped(Mutex::new(stopped))) };
        (handle, engine_loop, Demultiplexer::new(messages), running)
    }

    /// A waiter for the engine's end that does not keep it running.
    pub fn end(&self) -> EngineEnd {
        EngineEnd(self.stopped.clone())
    }

    /// Queues a request. A refusal is typed and immediate; a request that can never run is not queued.
    pub fn submit(&self, request: GenerateRequest) -> Result<TokenStream, SubmitError> {
        self.shared.limits.check(&request)?;
        if !self.shared.alive.load(Ordering::Acquire) {
            return Err(SubmitError::EngineStopped);
        }
        if self.shared.live.load(Ordering::Acquire) == 0 {
            // The deadline of a step starts with the work, not with the step before it.
            self.shared.stats().1 = self.shared.clock.now();
        }
        let queued = self.shared.live.fetch_add(1, Ordering::AcqRel);
        if queued >= self.shared.config.max_queued {
            self.shared.live.fetch_sub(1, Ordering::AcqRel);
            return Err(SubmitError::QueueFull { queued });
        }
        let id = RequestId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        let (stream, events, cancellation) = TokenStream::new(id, request.max_tokens, self.shared.clock.now());
        self.send(Command::Submit(Submission { id, request, events, cancellation })).inspect_err(|_| {
            self.shared.live.fetch_sub(1, Ordering::AcqRel);
        })?;
        Ok(stream)
    }

    /// Clears the prefix cache; blocks held by requests stay. Returns when it is done, after the step in flight at the
    /// latest.
    pub async fn reset_prefix_cache(&self) -> Result<(), SubmitError> {
        let (done, waiting) = oneshot::channel();
        self.send(Command::ResetPrefixCache(done))?;
        waiting.await.map_err(|_| SubmitError::EngineStopped)
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
        let live = self.shared.live.load(Ordering::Acquire);
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
        let idle = self.shared.live.load(Ordering::Acquire) == 0;
        let last_step = self.shared.stats().1;
        let since = self.shared.clock.now().saturating_duration_since(last_step);
        self.shared.alive.load(Ordering::Acquire) && (idle || since < self.shared.config.step_deadline)
    }
}
