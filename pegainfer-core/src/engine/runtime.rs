//! The engine thread: takes requests, runs steps, hands each step's events to one demultiplexer thread.
//!
//! The engine plans and launches steps while older ones run, so that a device never waits for the host: the loop
//! launches as long as the engine plans, and otherwise waits for the oldest step in flight.

use super::demux::{Demux, demultiplex, is_last};
use super::step_tokens::StepTokens;
use super::stream::{Cancellation, Stamped};
use super::{
    EngineError, EngineLimits, EngineStats, EventBatch, GenerateRequest, RequestId, StepEngine, SubmitError,
    TokenEvent, TokenStream,
};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc as events, oneshot};

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

/// How long the last handle waits for the engine's end.
const STOPS_WITHIN: Duration = Duration::from_secs(5);
/// Steps whose events may wait for the demultiplexer before the engine waits for it.
const DEMUX_STEPS: usize = 64;

struct Submission {
    id: RequestId,
    request: GenerateRequest,
    events: events::Sender<Stamped>,
    cancellation: Arc<Cancellation>,
}

/// What handles ask of the engine thread.
enum Command {
    Submit(Submission),
    /// Answered when it is done.
    ResetPrefixCache(oneshot::Sender<()>),
}

struct Shared {
    limits: EngineLimits,
    config: EngineConfig,
    live: AtomicUsize,
    next_id: AtomicU64,
    alive: AtomicBool,
    /// Why the engine has stopped, if an error is the reason.
    failure: OnceLock<String>,
    stats: Mutex<(EngineStats, Instant)>,
    step_tokens: Mutex<StepTokens>,
}

impl Shared {
    fn stats(&self) -> MutexGuard<'_, (EngineStats, Instant)> {
        // The guarded value is plain data: a panic elsewhere cannot leave it half-written.
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A cheap, cloneable way to reach a running engine. The engine stops when the last handle is dropped and its last
/// request has ended; the drop of the last handle waits for that, for a few seconds at most: a process must not end while
/// the engine is still giving its device back.
#[derive(Clone)]
pub struct EngineHandle {
    commands: SyncSender<Command>,
    shared: Arc<Shared>,
    /// After `commands`, so that the engine knows of the end before the last handle waits for it.
    _stopped: Arc<Stopped>,
}

/// Disconnected once the engine is gone.
struct Stopped(Mutex<Receiver<()>>);

impl Drop for Stopped {
    fn drop(&mut self) {
        let stopped = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(STOPS_WITHIN) {
            log::warn!("the engine does not stop; leaving it behind");
        }
    }
}

impl EngineHandle {
    /// Starts the engine thread and its demultiplexer.
    pub fn spawn<E: StepEngine>(engine: E, config: EngineConfig) -> std::io::Result<Self> {
        let (commands, inbox) = sync_channel(config.max_queued);
        let (demux, batches) = sync_channel(DEMUX_STEPS);
        let shared = Arc::new(Shared {
            limits: engine.limits(),
            config,
            live: AtomicUsize::new(0),
            next_id: AtomicU64::new(0),
            alive: AtomicBool::new(true),
            failure: OnceLock::new(),
            stats: Mutex::new((engine.stats(), Instant::now())),
            step_tokens: Mutex::default(),
        });
        std::thread::Builder::new().name("demux".into()).spawn(move || demultiplex(&batches))?;
        let counted = tokens(&engine.stats());
        let mut runtime = Runtime { engine, inbox, demux, shared: shared.clone(), open: HashMap::new(), counted };
        let (running, stopped) = channel::<()>();
        std::thread::Builder::new().name("engine".into()).spawn(move || {
            if catch_unwind(AssertUnwindSafe(|| runtime.run())).is_err() {
                // The first reason stays.
                let _ = runtime.shared.failure.set("it panicked".to_owned());
                log::error!("the engine panicked; every open request fails and /health says so");
            }
            runtime.shared.alive.store(false, Ordering::Release);
            // This drops the demultiplexer's sender, which closes every open stream, and the engine.
            drop(runtime);
            drop(running);
        })?;
        Ok(Self { commands, shared, _stopped: Arc::new(Stopped(Mutex::new(stopped))) })
    }

    /// Queues a request. Every refusal is typed and immediate; nothing that can never run is queued.
    pub fn submit(&self, request: GenerateRequest) -> Result<TokenStream, SubmitError> {
        self.shared.limits.check(&request)?;
        if !self.shared.alive.load(Ordering::Acquire) {
            return Err(SubmitError::EngineStopped);
        }
        if self.shared.live.load(Ordering::Acquire) == 0 {
            // The deadline of a step starts with the work, not with the step before it.
            self.shared.stats().1 = Instant::now();
        }
        let queued = self.shared.live.fetch_add(1, Ordering::AcqRel);
        if queued >= self.shared.config.max_queued {
            self.shared.live.fetch_sub(1, Ordering::AcqRel);
            return Err(SubmitError::QueueFull { queued });
        }
        let id = RequestId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        let (stream, events, cancellation) = TokenStream::new(id, request.max_tokens);
        self.send(Command::Submit(Submission { id, request, events, cancellation })).inspect_err(|_| {
            self.shared.live.fetch_sub(1, Ordering::AcqRel);
        })?;
        Ok(stream)
    }

    /// Forgets every cached prefix; blocks that requests hold stay with them. Returns when it is done, at the latest
    /// after the step that is being waited for.
    pub async fn reset_prefix_cache(&self) -> Result<(), SubmitError> {
        let (done, waiting) = oneshot::channel();
        self.send(Command::ResetPrefixCache(done))?;
        waiting.await.map_err(|_| SubmitError::EngineStopped)
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

    /// How many tokens the steps had.
    pub fn step_tokens(&self) -> StepTokens {
        *self.shared.step_tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why the engine has stopped, after a fatal error or a panic: for people.
    pub fn failure(&self) -> Option<&str> {
        self.shared.failure.get().map(String::as_str)
    }

    /// False once the engine has stopped, as after a fatal error, and while it has work but passes the deadline of a step.
    pub fn is_healthy(&self) -> bool {
        let idle = self.shared.live.load(Ordering::Acquire) == 0;
        let last_step = self.shared.stats().1;
        self.shared.alive.load(Ordering::Acquire) && (idle || last_step.elapsed() < self.shared.config.step_deadline)
    }
}

struct Runtime<E> {
    engine: E,
    inbox: Receiver<Command>,
    demux: SyncSender<Demux>,
    shared: Arc<Shared>,
    /// Every request that has not ended.
    open: HashMap<RequestId, Arc<Cancellation>>,
    /// Tokens of all steps that `step_tokens` has.
    counted: u64,
}

/// Tokens that an engine has admitted and generated.
fn tokens(stats: &EngineStats) -> u64 {
    stats.prompt_tokens + stats.generation_tokens
}

impl<E: StepEngine> Runtime<E> {
    fn run(&mut self) {
        loop {
            if self.open.is_empty() && !self.engine.has_work() {
                // Nothing to do: sleep until a request comes or the last handle goes.
                let Ok(command) = self.inbox.recv() else { return };
                self.obey(command);
            }
            while let Ok(command) = self.inbox.try_recv() {
                self.obey(command);
            }
            self.drop_cancelled();
            if self.engine.has_work()
                && let Err(error) = self.step()
            {
                self.fail(&error);
                if error.fatal {
                    return;
                }
            }
            self.publish();
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit(submission) => self.accept(submission),
            Command::ResetPrefixCache(done) => {
                self.engine.reset_prefix_cache();
                // Who asked may have gone; the cache is empty all the same.
                let _ = done.send(());
            }
        }
    }

    fn accept(&mut self, submission: Submission) {
        let Submission { id, request, events, cancellation } = submission;
        self.open.insert(id, cancellation);
        self.send(Demux::Open(id, events));
        self.engine.add(id, request);
    }

    fn drop_cancelled(&mut self) {
        let now = self.engine.now();
        let gone: Vec<RequestId> = self.open.iter().filter(|(_, c)| c.is_due(now)).map(|(id, _)| *id).collect();
        for id in gone {
            self.engine.cancel(id);
            self.forget(id);
            self.send(Demux::Close(id));
        }
    }

    /// Launches the next step, or finishes the oldest one when none can be planned.
    fn step(&mut self) -> Result<(), EngineError> {
        match self.engine.plan() {
            Some(admitted) => {
                self.forward(admitted);
                self.engine.launch()
            }
            None => {
                self.engine.wait();
                let events = self.engine.finish()?;
                self.count_step();
                self.forward(events);
                Ok(())
            }
        }
    }

    fn count_step(&mut self) {
        let tokens = tokens(&self.engine.stats());
        let of_step = tokens - std::mem::replace(&mut self.counted, tokens);
        if of_step > 0 {
            self.shared.step_tokens.lock().unwrap_or_else(PoisonError::into_inner).observe(of_step);
        }
    }

    /// Fails every request. After a fatal error nothing is accepted any more, and whoever hears of the failure can
    /// already see that.
    fn fail(&mut self, error: &EngineError) {
        log::error!("a step failed: {error}{}", if error.fatal { "; the engine stops" } else { "" });
        if error.fatal {
            // The first reason stays.
            let _ = self.shared.failure.set(error.to_string());
            self.shared.alive.store(false, Ordering::Release);
        }
        let failed = TokenEvent::Failed { error: error.to_string() };
        let events = self.engine.abort_all().into_iter().map(|id| (id, failed.clone())).collect();
        self.forward(events);
    }

    fn forward(&mut self, batch: EventBatch) {
        for (id, event) in &batch {
            if is_last(event) {
                self.forget(*id);
            }
        }
        // Publish first: a client that sees its last token sees the blocks free, too, unless a step in flight still
        // uses them.
        self.publish();
        if !batch.is_empty() {
            self.send(Demux::Events(self.engine.now(), batch));
        }
    }

    fn forget(&mut self, id: RequestId) {
        if self.open.remove(&id).is_some() {
            self.shared.live.fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn publish(&mut self) {
        *self.shared.stats() = (self.engine.stats(), self.engine.now());
    }

    fn send(&self, message: Demux) {
        // The demultiplexer lives as long as this sender; a failed send means the process is going down.
        let _ = self.demux.send(message);
    }
}
