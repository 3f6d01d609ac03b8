//! The handle through which the server reaches its engines.

use super::cell::{EngineCell, Stopped};
use super::front::{Front, RouteCounts};
use super::{EngineConfig, EngineLimits, EngineStats, GenerateRequest, StepEngine, SubmitError, TokenStream};
use crate::schedule::recording::ScheduleSink;
use std::sync::Arc;

/// A cheap, cloneable handle of running engines, usually of one. The engines stop after the last handle is dropped and
/// the last request has ended. Dropping the last handle waits a few seconds for that, so that the process does not exit
/// while an engine still releases its device.
#[derive(Clone)]
pub struct EngineHandle(Arc<Front>);

/// Waits for the end of engines without keeping them running.
pub struct EngineEnd(Vec<Arc<Stopped>>);

impl EngineEnd {
    /// Waits until the last handle is dropped, on any thread, and the engines have released their devices; gives up
    /// after a few seconds. A process that exits earlier may crash while the driver is still being closed.
    pub fn wait(&self) {
        self.0.iter().for_each(|stopped| stopped.wait());
    }
}

impl EngineHandle {
    /// Starts the threads of an engine.
    pub fn spawn<E: StepEngine>(engine: E, config: EngineConfig) -> std::io::Result<Self> {
        EngineCell::spawn(engine, config).map(Self::of)
    }

    /// The handle of one engine.
    pub(super) fn of(cell: EngineCell) -> Self {
        Self(Arc::new(Front::new(vec![cell])))
    }

    /// One handle of the engines of several, which must be engines of the same model without requests or clones.
    ///
    /// # Panics
    /// Without handles, or if one of them has a clone.
    pub fn join(handles: Vec<Self>) -> Self {
        let fronts = handles.into_iter().map(|handle| Arc::into_inner(handle.0));
        let cells: Vec<EngineCell> = fronts.flat_map(|front| front.expect("the handle has no clone").take()).collect();
        assert!(!cells.is_empty(), "a handle has an engine");
        Self(Arc::new(Front::new(cells)))
    }

    /// The engines, in the order of their numbers.
    pub fn engines(&self) -> &[EngineCell] {
        self.0.cells()
    }

    /// Number of requests that each engine was sent, by reason; zero if there is only one engine.
    pub fn routes(&self) -> Vec<RouteCounts> {
        self.0.routes()
    }

    /// A waiter for the engines' end that does not keep them running.
    pub fn end(&self) -> EngineEnd {
        EngineEnd(self.engines().iter().map(|cell| cell.stopped().clone()).collect())
    }

    /// Queues a request on one of the engines. A refusal is typed and immediate; a request that can never run is not
    /// queued.
    pub fn submit(&self, request: GenerateRequest) -> Result<TokenStream, SubmitError> {
        self.0.submit(request)
    }

    /// Clears the prefix caches of all engines that run; blocks held by requests stay. Returns when it is done, after
    /// the steps in flight at the latest.
    pub async fn reset_prefix_cache(&self) -> Result<(), SubmitError> {
        self.0.reset_prefix_caches().await
    }

    /// Sends every input of each engine's schedule and every planned step to the sink of the engine with that number,
    /// from now on. A recording can be replayed only if it starts before the first request; see
    /// [`recording`](crate::schedule::recording).
    pub fn record_schedule(&self, sink: impl Fn(usize) -> Box<dyn ScheduleSink>) -> Result<(), SubmitError> {
        self.engines().iter().enumerate().try_for_each(|(i, engine)| engine.record_schedule(sink(i)))
    }

    /// Refuses requests that no engine can ever serve. Pure: does not look at the queues.
    pub fn check(&self, request: &GenerateRequest) -> Result<(), SubmitError> {
        self.0.check(request)
    }

    /// Fixed properties of the engine with the largest KV pool. The engines are of one model and kind of device, so
    /// only the sizes of their pools may differ.
    pub fn limits(&self) -> &EngineLimits {
        self.0.limits()
    }

    /// Sums of the engines' gauges and counters as of their last steps. Requests submitted since count as waiting.
    pub fn stats(&self) -> EngineStats {
        self.engines().iter().map(EngineCell::stats).sum()
    }

    /// Reason why the last engine has stopped, after a fatal error or a panic, as a sentence. `None` while one runs.
    pub fn failure(&self) -> Option<&str> {
        let mut engines = self.engines().iter();
        if engines.any(|engine| engine.failure().is_none()) {
            return None;
        }
        self.engines().first().and_then(EngineCell::failure)
    }

    /// True while one engine is healthy: it has not stopped, and no step with work to do exceeds its deadline.
    pub fn is_healthy(&self) -> bool {
        self.engines().iter().any(EngineCell::is_healthy)
    }
}
