//! The interface between the engine thread and a model.

use super::{Clock, EngineLimits, EngineStats, GenerateRequest, RequestId, TokenEvent};
use crate::kv::BlockPool;
use crate::ledger::StepLog;
use crate::schedule::recording::ScheduleSink;
use std::sync::Arc;
use std::time::Instant;
use thiserror::Error;

/// Events of several requests, in the order they happened.
pub type EventBatch = Vec<(RequestId, TokenEvent)>;

/// A failed step.
#[derive(Debug, Error)]
#[error("{message}")]
pub struct EngineError {
    /// Cause of the failure, with the name of the op.
    pub message: String,
    /// The device is lost and no later step can succeed: every request ends, the engine stops, and `/health` reports
    /// it. Otherwise the engine continues after [`StepEngine::recover`].
    pub fatal: bool,
}

/// A scheduler and an executor, driven through `plan`, `launch` and `finish`.
pub trait StepEngine: Send + 'static {
    /// Fixed properties; read once.
    fn limits(&self) -> EngineLimits;
    /// Queues a request that passed [`EngineLimits::check`].
    fn add(&mut self, id: RequestId, request: GenerateRequest);
    /// Removes a request and frees its blocks once no step in flight uses them. Unknown ids are ignored, because the
    /// request may have just finished.
    fn cancel(&mut self, id: RequestId);
    /// True while any request is waiting or running, or a step is in flight.
    fn has_work(&self) -> bool;
    /// Chooses the next step and returns its admissions; [`launch`](Self::launch) follows. `None` if a step in flight
    /// or a grammar's mask must be finished first. Called only while there is work.
    fn plan(&mut self) -> Option<EventBatch>;
    /// Starts the planned step; returns before the device is done with it. After an error the caller calls
    /// [`recover`](Self::recover), or [`end_all`](Self::end_all) if it is fatal.
    fn launch(&mut self) -> Result<(), EngineError>;
    /// Clock of deadlines, time stamps and step times; handles read it once. A simulated device has its own clock.
    fn clock(&self) -> Clock {
        Clock::Wall
    }
    /// Current time of that clock.
    fn now(&self) -> Instant {
        self.clock().now()
    }
    /// Waits up to a millisecond for a grammar mask that the next [`plan`](Self::plan) or the newest step's sampling
    /// needs, or for more prompts while admission is delayed. Returns at once while a sampled step is in flight. Called
    /// only after `plan` returned `None`.
    fn wait(&mut self) {}
    /// Waits for the oldest step in flight and commits its outcome; if that step is not sampled yet, samples it
    /// instead, if possible. Without a step in flight, ends the requests that cannot continue. Called only after `plan`
    /// returned `None`. Errors as in [`launch`](Self::launch).
    fn finish(&mut self) -> Result<EventBatch, EngineError>;
    /// Recovers from an `error` that is not fatal: drops all steps in flight and returns the last events of the
    /// requests that end because of it. By default all requests end.
    fn recover(&mut self, error: &EngineError) -> EventBatch {
        self.end_all(error)
    }
    /// Drops all requests and all steps in flight because of `error`; returns the requests' last events.
    fn end_all(&mut self, error: &EngineError) -> EventBatch {
        let failed = TokenEvent::Failed { error: error.to_string() };
        self.abort_all().into_iter().map(|id| (id, failed.clone())).collect()
    }
    /// Drops all requests and all steps in flight, frees the blocks, and returns the ids of the requests.
    fn abort_all(&mut self) -> Vec<RequestId>;
    /// Clears the prefix cache. Blocks held by requests stay.
    fn reset_prefix_cache(&mut self);
    /// Gauges and counters now.
    fn stats(&self) -> EngineStats;
    /// Step times; `None` if the engine keeps none.
    fn step_log(&self) -> Option<Arc<StepLog>> {
        None
    }
    /// The KV pool, whose prefix cache other threads may look into; `None` if the engine has none. Read once.
    fn pool(&self) -> Option<BlockPool> {
        None
    }
    /// Sends every input of the schedule and every planned step to `sink` from now on. Called before the first request.
    /// Ignored by engines without the scheduler.
    fn record_schedule(&mut self, sink: Box<dyn ScheduleSink>) {
        drop(sink);
    }
}
