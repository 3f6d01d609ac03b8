//! The engine thread: takes requests, runs steps, hands each step's events to the demultiplexer.
//!
//! The engine plans and launches steps while older ones run, so the device never waits for the host. The loop launches
//! while the engine has a step to plan; otherwise it waits for the oldest step in flight.

use super::demux::{Demux, is_last};
use super::events::Cancellation;
use super::shared::{Command, Fault, FaultKind, Shared, Submission};
use super::{EngineError, EngineStats, EventBatch, RequestId, StepEngine, TokenEvent};
use crate::schedule::group;
use crate::sync::atomic::Ordering;
use crate::sync::queue::{Receiver, SyncSender};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::mpsc::TryRecvError;

/// Next action of the engine loop after a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// The next turn follows.
    Next,
    /// Nothing to do until a command arrives.
    Idle,
    /// The loop ends: the last handle is gone and the last request has ended, or the device is lost.
    Over,
}

/// The loop of the engine thread.
pub(super) struct EngineLoop<E> {
    pub(super) engine: E,
    inbox: Receiver<Command>,
    demux: SyncSender<Demux>,
    shared: Arc<Shared>,
    /// Requests that have not ended. Ordered by id, so that a simulation depends only on its seed.
    open: BTreeMap<RequestId, OpenRequest>,
    /// Requests without a first token, their groups of tenants, and the prompt tokens that they are predicted to
    /// compute. Empty if the handle has one engine.
    uncomputed: HashMap<RequestId, (u32, usize)>,
    /// Tokens of all steps that `step_tokens` has.
    counted: u64,
}

/// A request that has not ended.
struct OpenRequest {
    cancellation: Arc<Cancellation>,
    /// Its group of tenants, in whose load it counts; `None` if the handle has one engine.
    group: Option<u32>,
}

/// Tokens that an engine has admitted and generated.
fn tokens(stats: &EngineStats) -> u64 {
    stats.prompt_tokens + stats.generation_tokens
}

impl<E: StepEngine> EngineLoop<E> {
    pub(super) fn new(engine: E, inbox: Receiver<Command>, demux: SyncSender<Demux>, shared: Arc<Shared>) -> Self {
        let counted = tokens(&engine.stats());
        Self { engine, inbox, demux, shared, open: BTreeMap::new(), uncomputed: HashMap::new(), counted }
    }

    /// Runs until the last handle is gone and the last request has ended, or the device is lost.
    pub(super) fn run(&mut self) {
        loop {
            match self.turn() {
                Turn::Next => {}
                // Sleep until a request comes or the last handle goes.
                Turn::Idle => match self.inbox.recv() {
                    Ok(command) => self.handle(command),
                    Err(_) => return,
                },
                Turn::Over => return,
            }
        }
    }

    /// Handles queued commands, drops cancelled requests, and launches or finishes a step. May wait for a step in
    /// flight, never for a command.
    pub(super) fn turn(&mut self) -> Turn {
        let abandoned = self.handle_all();
        self.drop_cancelled();
        if self.engine.has_work()
            && let Err(error) = self.step()
        {
            self.fail(&error);
            if error.fatal {
                return Turn::Over;
            }
        }
        self.publish();
        match !self.open.is_empty() || self.engine.has_work() {
            true => Turn::Next,
            false if abandoned => Turn::Over,
            false => Turn::Idle,
        }
    }

    /// Handles all queued commands; returns true if the last handle is gone.
    fn handle_all(&mut self) -> bool {
        loop {
            match self.inbox.try_recv() {
                Ok(command) => self.handle(command),
                Err(error) => return error == TryRecvError::Disconnected,
            }
        }
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Submit(submission) => self.accept(*submission),
            Command::ResetPrefixCache(done) => {
                self.engine.reset_prefix_cache();
                // The caller may be gone; the cache is empty either way.
                let _ = done.send(());
            }
            Command::RecordSchedule(sink) => self.engine.record_schedule(sink),
        }
    }

    fn accept(&mut self, submission: Submission) {
        let Submission { id, request, uncomputed, events, cancellation } = submission;
        let group = uncomputed.map(|_| group(request.tenant));
        self.open.insert(id, OpenRequest { cancellation, group });
        self.uncomputed.extend(group.zip(uncomputed).map(|counted| (id, counted)));
        self.send(Demux::Open(id, events));
        self.engine.add(id, request);
    }

    fn drop_cancelled(&mut self) {
        let now = self.engine.now();
        let gone: Vec<RequestId> =
            self.open.iter().filter(|(_, open)| open.cancellation.is_due(now)).map(|(id, _)| *id).collect();
        for id in gone {
            self.engine.cancel(id);
            self.remove(id);
            self.send(Demux::Close(id));
        }
    }

    /// Launches the next step, or finishes the oldest one if none can be planned.
    fn step(&mut self) -> Result<(), EngineError> {
        self.inject_fault()?;
        match self.engine.plan() {
            Some(admitted) => {
                self.deliver(admitted);
                self.engine.launch()
            }
            None => {
                self.engine.wait();
                let events = self.engine.finish()?;
                self.count_step();
                self.deliver(events);
                Ok(())
            }
        }
    }

    /// Does what a test asks for; see [`Fault`].
    fn inject_fault(&self) -> Result<(), EngineError> {
        match self.shared.config.fault.filter(|fault| self.engine.stats().steps >= fault.after) {
            None => Ok(()),
            Some(Fault { kind: FaultKind::Lost, .. }) => {
                Err(EngineError { message: "its device is lost, as a test asks for".into(), fatal: true })
            }
            Some(Fault { kind: FaultKind::Stuck, .. }) => loop {
                std::thread::park();
            },
        }
    }

    fn count_step(&mut self) {
        let tokens = tokens(&self.engine.stats());
        let of_step = tokens - std::mem::replace(&mut self.counted, tokens);
        if of_step > 0 {
            self.shared.step_tokens().observe(of_step);
        }
    }

    /// Ends the requests that cannot continue after a failed step. A fatal error ends all of them, including requests
    /// still in the inbox; the engine then refuses new ones. The failure is visible before any client hears of it.
    fn fail(&mut self, error: &EngineError) {
        let events = if error.fatal {
            log::error!("a step failed: {error}; the engine stops");
            // The first reason stays.
            let _ = self.shared.failure.set(error.to_string());
            self.shared.alive.store(false, Ordering::Release);
            self.handle_all();
            self.engine.end_all(error)
        } else {
            let ended = self.engine.recover(error);
            match ended.len() {
                0 => log::warn!("a step failed: {error}; its requests run again"),
                requests => log::error!("a step failed: {error}; requests that end with this error: {requests}"),
            }
            ended
        };
        self.deliver(events);
    }

    fn deliver(&mut self, batch: EventBatch) {
        for (id, event) in &batch {
            if is_last(event) {
                self.remove(*id);
            } else if !self.uncomputed.is_empty() && matches!(event, TokenEvent::Token(_)) {
                self.computed(*id);
            }
        }
        // Publish first: a client that sees its last token also sees its blocks free, unless a step in flight still
        // uses them.
        self.publish();
        if !batch.is_empty() {
            self.send(Demux::Events(self.engine.now(), batch));
        }
    }

    /// Records that nothing of this request's prompt is left to compute.
    fn computed(&mut self, id: RequestId) {
        if let Some((group, tokens)) = self.uncomputed.remove(&id) {
            self.shared.subtract_tokens(group, tokens);
        }
    }

    fn remove(&mut self, id: RequestId) {
        self.computed(id);
        if let Some(open) = self.open.remove(&id) {
            if let Some(group) = open.group {
                self.shared.subtract_request(group);
            }
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

impl<E> EngineLoop<E> {
    /// Records that the engine panicked; the loop must not run again.
    pub(super) fn panicked(&self) {
        // The first reason stays.
        let _ = self.shared.failure.set("it panicked".to_owned());
        log::error!("the engine panicked; every open request fails and /health says so");
    }
}

impl<E> Drop for EngineLoop<E> {
    fn drop(&mut self) {
        // Before the streams close: a client that sees its stream closed also sees the engine stopped.
        self.shared.alive.store(false, Ordering::Release);
    }
}
