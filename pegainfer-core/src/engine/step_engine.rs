//! What the engine thread asks of a model crate.

use super::{EngineLimits, EngineStats, GenerateRequest, RequestId, TokenEvent};
use crate::grammar::GrammarTracker;
use std::time::Duration;
use thiserror::Error;

/// Events of several requests, in the order they happened.
pub type EventBatch = Vec<(RequestId, TokenEvent)>;

/// A step failed.
#[derive(Debug, Error)]
#[error("{message}")]
pub struct EngineError {
    /// What went wrong, with the name of the op.
    pub message: String,
    /// No later step can succeed either, because the device is lost: the engine stops and `/health` says so. Otherwise
    /// only the requests of now fail.
    pub fatal: bool,
}

/// How long to wait for a mask before new requests and cancellations are looked at again.
const MASK_WAIT: Duration = Duration::from_millis(1);

/// How long an idle device waits for more prompts before the queue is looked at again.
const ARRIVALS_WAIT: Duration = Duration::from_micros(100);

/// What an engine waits for that has work, no step in flight, and none to plan.
#[derive(Debug)]
pub enum Wait<'a> {
    /// The next mask of a grammar.
    Mask(&'a GrammarTracker),
    /// More prompts: admission is delayed while they arrive.
    Arrivals,
}

impl Wait<'_> {
    /// Waits for it, for a millisecond at most.
    pub fn wait(self) {
        match self {
            Self::Mask(grammar) => grammar.wait(MASK_WAIT),
            Self::Arrivals => std::thread::sleep(ARRIVALS_WAIT),
        }
    }
}

/// What a model crate gives to the engine thread: scheduler and executor behind `plan`, `launch` and `finish`.
pub trait StepEngine: Send + 'static {
    /// Fixed properties; asked once.
    fn limits(&self) -> EngineLimits;
    /// Queues a request that passed [`EngineLimits::check`].
    fn add(&mut self, id: RequestId, request: GenerateRequest);
    /// Forgets a request and frees its blocks once no step in flight uses them; unknown ids are ignored (it may have
    /// finished just now).
    fn cancel(&mut self, id: RequestId);
    /// True while any request is waiting or running, or a step is in flight.
    fn has_work(&self) -> bool;
    /// Chooses the next step and returns the admissions it makes; [`launch`](Self::launch) follows. `None` when a step
    /// in flight has to finish first, or a grammar's mask. Called only while there is work.
    fn plan(&mut self) -> Option<EventBatch>;
    /// Starts the planned step; returns before the device is done with it. On an error the caller drops every request
    /// with [`abort_all`](Self::abort_all).
    fn launch(&mut self) -> Result<(), EngineError>;
    /// What to wait for before the next [`plan`](Self::plan) can give a step; `None` while one is in flight. Asked only after
    /// `plan` gave `None`.
    fn waits_for(&self) -> Option<Wait<'_>> {
        None
    }
    /// Waits for the oldest step in flight and commits its outcome; where there is none, ends the requests that cannot go
    /// on. Called only after `plan` gave `None`. Errors as in [`launch`](Self::launch).
    fn finish(&mut self) -> Result<EventBatch, EngineError>;
    /// Drops every request and every step in flight, and frees the blocks; returns the ids of the requests.
    fn abort_all(&mut self) -> Vec<RequestId>;
    /// Forgets every cached prefix. Blocks that requests hold stay with them.
    fn reset_prefix_cache(&mut self);
    /// Gauges and counters now.
    fn stats(&self) -> EngineStats;
}
