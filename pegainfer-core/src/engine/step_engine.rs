//! What the engine thread asks of a model crate.

use super::{Clock, EngineLimits, EngineStats, GenerateRequest, RequestId, TokenEvent};
use crate::ledger::StepLog;
use crate::schedule::recording::ScheduleSink;
use std::sync::Arc;
use std::time::Instant;
use thiserror::Error;

/// Events of several requests, in the order they happened.
pub type EventBatch = Vec<(RequestId, TokenEvent)>;

/// A step failed.
#[derive(Debug, Error)]
#[error("{message}")]
pub struct EngineError {
    /// What went wrong, with the name of the op.
    pub message: String,
    /// No later step can succeed either, because the device is lost: every request ends, the engine stops and `/health`
    /// says so. Otherwise the engine goes on after [`StepEngine::recover`].
    pub fatal: bool,
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
    /// Starts the planned step; returns before the device is done with it. After an error the caller calls
    /// [`recover`](Self::recover), or [`end_all`](Self::end_all) if it is fatal.
    fn launch(&mut self) -> Result<(), EngineError>;
    /// The clock that deadlines, time stamps and step times are read from; the handles get it once. A simulated device has
    /// its own.
    fn clock(&self) -> Clock {
        Clock::Wall
    }
    /// The time on that clock.
    fn now(&self) -> Instant {
        self.clock().now()
    }
    /// Waits at most a millisecond for a grammar's mask that the next [`plan`](Self::plan) or the newest step's
    /// sampling needs, or for more prompts while admission is delayed. Returns at once while a sampled step is in
    /// flight. Called only after `plan` gave `None`.
    fn wait(&mut self) {}
    /// Waits for the oldest step in flight and commits its outcome. If that step is not sampled yet, samples it
    /// instead, if possible. Without a step in flight, ends the requests that cannot go on. Called only after `plan`
    /// gave `None`. Errors as in [`launch`](Self::launch).
    fn finish(&mut self) -> Result<EventBatch, EngineError>;
    /// After an `error` that is not fatal: drops every step in flight and returns the last events of the requests that
    /// end because of it. The others go on. By default all end.
    fn recover(&mut self, error: &EngineError) -> EventBatch {
        self.end_all(error)
    }
    /// Drops every request and every step in flight because of `error`; returns the requests' last events.
    fn end_all(&mut self, error: &EngineError) -> EventBatch {
        let failed = TokenEvent::Failed { error: error.to_string() };
        self.abort_all().into_iter().map(|id| (id, failed.clone())).collect()
    }
    /// Drops every request and every step in flight, and frees the blocks; returns the ids of the requests.
    fn abort_all(&mut self) -> Vec<RequestId>;
    /// Forgets every cached prefix. Blocks that requests hold stay with them.
    fn reset_prefix_cache(&mut self);
    /// Gauges and counters now.
    fn stats(&self) -> EngineStats;
    /// Times of its steps; `None` for an engine that keeps none.
    fn step_log(&self) -> Option<Arc<StepLog>> {
        None
    }
    /// Tells `sink` from now on what decides the schedule and which steps are planned. Called before the first request; an
    /// engine that does not plan with the scheduler ignores it.
    fn record_schedule(&mut self, sink: Box<dyn ScheduleSink>) {
        drop(sink);
    }
}
