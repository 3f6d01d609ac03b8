//! An engine whose requests all name one adapter.

use pegainfer_core::adapter::Adapter;
use pegainfer_core::engine::{
    EngineError, EngineLimits, EngineStats, EventBatch, GenerateRequest, RequestId, StepEngine,
};
use std::sync::Arc;

/// An engine that gives every request an adapter, or none.
pub struct WithAdapter<E>(pub E, pub Option<Arc<Adapter>>);

impl<E: StepEngine> StepEngine for WithAdapter<E> {
    fn limits(&self) -> EngineLimits {
        self.0.limits()
    }
    fn add(&mut self, id: RequestId, request: GenerateRequest) {
        self.0.add(id, GenerateRequest { adapter: self.1.clone(), ..request });
    }
    fn cancel(&mut self, id: RequestId) {
        self.0.cancel(id);
    }
    fn has_work(&self) -> bool {
        self.0.has_work()
    }
    fn plan(&mut self) -> Option<EventBatch> {
        self.0.plan()
    }
    fn launch(&mut self) -> Result<(), EngineError> {
        self.0.launch()
    }
    fn wait(&mut self) {
        self.0.wait();
    }
    fn finish(&mut self) -> Result<EventBatch, EngineError> {
        self.0.finish()
    }
    fn abort_all(&mut self) -> Vec<RequestId> {
        self.0.abort_all()
    }
    fn reset_prefix_cache(&mut self) {
        self.0.reset_prefix_cache();
    }
    fn stats(&self) -> EngineStats {
        self.0.stats()
    }
}
