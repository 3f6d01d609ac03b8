//! Checks the calls between the engine loop and its engine.

use super::executor::{Spoil, VirtualDevice};
use pegainfer_core::engine::{
    Clock, EngineError, EngineLimits, EngineStats, EventBatch, GenerateRequest, RequestId, StepEngine, TokenEvent,
};
use pegainfer_core::schedule::EngineCore;
use std::collections::{BTreeMap, BTreeSet};

/// Requests that the engine got, by their ends.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Ends {
    pub finished: u64,
    /// Their grammar failed.
    pub broken: u64,
    pub cancelled: u64,
    /// Requests aborted with the device.
    pub aborted: u64,
    /// Alone, because it was to blame for failed steps.
    pub failed: u64,
}

impl Ends {
    pub fn sum(self) -> u64 {
        self.finished + self.broken + self.cancelled + self.aborted + self.failed
    }
}

/// Failed steps of a request without a token between them: together, together again, and alone.
const MAX_RETRIES: u32 = 3;

/// An engine under observation.
pub struct Tap<K: Spoil + Send + 'static> {
    pub engine: EngineCore<VirtualDevice<K>>,
    /// Requests that the engine has.
    pub live: BTreeSet<RequestId>,
    /// Tokens of each request so far, also after its end.
    pub emitted: BTreeMap<RequestId, usize>,
    pub ends: Ends,
    /// Steps that failed.
    pub failures: u64,
    /// Failed steps of each request since its last token.
    retries: BTreeMap<RequestId, u32>,
}

impl<K: Spoil + Send + 'static> Tap<K> {
    pub fn new(engine: EngineCore<VirtualDevice<K>>) -> Self {
        let (live, emitted, retries) = (BTreeSet::new(), BTreeMap::new(), BTreeMap::new());
        Self { engine, live, emitted, ends: Ends::default(), failures: 0, retries }
    }

    /// Records the end of a request, which may happen only once.
    fn end(&mut self, id: RequestId, event: &TokenEvent) {
        assert!(self.live.remove(&id), "{id:?} got {event:?} after its end");
    }

    fn observe(&mut self, events: &EventBatch) {
        for (id, event) in events {
            match event {
                TokenEvent::Token(_) => {
                    *self.emitted.entry(*id).or_default() += 1;
                    self.retries.remove(id);
                }
                TokenEvent::Finished { .. } => self.ends.finished += 1,
                TokenEvent::GrammarFailed { .. } => self.ends.broken += 1,
                TokenEvent::Failed { .. } => panic!("the engine fails {id:?} by itself"),
                TokenEvent::Admitted { .. } | TokenEvent::Prompt(_) | TokenEvent::Vector(_) => {}
            }
            match event {
                TokenEvent::Finished { .. } | TokenEvent::GrammarFailed { .. } => self.end(*id, event),
                _ => assert!(self.live.contains(id), "{id:?} got {event:?} after its end"),
            }
        }
    }
}

impl<K: Spoil + Send + 'static> StepEngine for Tap<K> {
    fn limits(&self) -> EngineLimits {
        self.engine.limits()
    }

    fn add(&mut self, id: RequestId, request: GenerateRequest) {
        assert!(self.live.insert(id) && self.emitted.insert(id, 0).is_none(), "{id:?} is added twice");
        self.engine.add(id, request);
    }

    fn cancel(&mut self, id: RequestId) {
        assert!(self.live.remove(&id), "{id:?} is cancelled after its end");
        self.ends.cancelled += 1;
        self.engine.cancel(id);
    }

    fn has_work(&self) -> bool {
        assert!(self.engine.has_work() || self.live.is_empty(), "the engine forgot {:?}", self.live);
        self.engine.has_work()
    }

    fn plan(&mut self) -> Option<EventBatch> {
        let admitted = self.engine.plan()?;
        self.observe(&admitted);
        Some(admitted)
    }

    fn launch(&mut self) -> Result<(), EngineError> {
        self.engine.launch().inspect_err(|_| self.failures += 1)
    }

    fn clock(&self) -> Clock {
        self.engine.clock()
    }

    fn wait(&mut self) {
        self.engine.wait();
    }

    fn finish(&mut self) -> Result<EventBatch, EngineError> {
        if self.live.is_empty() {
            // Without requests the engine is healthy, however long the last step takes.
            self.engine.executor().watch = None;
        }
        let events = self.engine.finish().inspect_err(|_| self.failures += 1)?;
        self.observe(&events);
        Ok(events)
    }

    fn recover(&mut self, error: &EngineError) -> EventBatch {
        let failed = self.engine.executor().failed_rows.clone();
        for id in &failed {
            let retries = self.retries.entry(*id).or_default();
            *retries += 1;
            assert!(*retries <= MAX_RETRIES, "{id:?} is tried again and again");
        }
        let events = self.engine.recover(error);
        assert!(events.len() <= 1, "{events:?}: one at most is to blame");
        for (id, event) in &events {
            assert!(failed == [*id] && matches!(event, TokenEvent::Failed { .. }), "{id:?} got {event:?}");
            self.ends.failed += 1;
            self.end(*id, event);
        }
        events
    }

    fn abort_all(&mut self) -> Vec<RequestId> {
        let ids = self.engine.abort_all();
        let aborted = BTreeSet::from_iter(ids.iter().copied());
        assert_eq!(aborted.len(), ids.len(), "a request is aborted twice");
        assert_eq!(aborted, std::mem::take(&mut self.live), "a request that is aborted gets its end");
        self.ends.aborted += ids.len() as u64;
        ids
    }

    fn reset_prefix_cache(&mut self) {
        self.engine.reset_prefix_cache();
    }

    fn stats(&self) -> EngineStats {
        self.engine.stats()
    }
}
