//! Requests that come to a world.

use super::client::{Client, Pace, Work};
use super::executor::Spoil;
use super::fault::Fault;
use super::world::World;
use crate::kinds::StepOf;
use pegainfer_core::engine::{SubmitError, TokenStream};
use std::ops::RangeInclusive;

impl<K: Spoil + Send + 'static> World<K>
where
    StepOf<K>: Send,
{
    /// Submits requests: one now and then, or more than the queue takes.
    pub(super) fn submit_all(&mut self) {
        let burst = self.faults.happens(Fault::Burst, 10);
        let requests = if burst { self.config.max_queued + 2 } else { usize::from(self.rng.chance(self.arrivals)) };
        for _ in 0..requests {
            self.submit();
        }
    }

    fn submit(&mut self) {
        let Some(handle) = self.handle.clone().filter(|_| !self.works.is_empty()) else { return };
        let work = self.choose_work();
        let queued = self.queued();
        let submitted = handle.submit(work.request.clone());
        if queued == 0 && submitted.is_ok() {
            self.busy_since = self.clock.now();
        }
        let idle = queued == 0 && submitted.is_err();
        let stuck_at = self.busy_since + self.config.step_deadline;
        assert_eq!(handle.is_healthy(), idle || self.clock.now() < stuck_at, "an engine with {queued} requests");
        let failures = self.engine.engine().engine.executor().failures;
        self.take(work, submitted, queued..=queued, failures);
    }

    /// Requests that were submitted and have not ended.
    pub(super) fn queued(&mut self) -> u64 {
        // A request of the last turn may have ended in it before it is counted.
        self.report.requests.saturating_sub(self.engine.engine().ends.sum())
    }

    /// Chooses the work of a request, sometimes as another choice of an open prompt.
    pub(super) fn choose_work(&mut self) -> Work {
        let mut work = self.works[self.rng.below(self.works.len())].clone();
        if !self.clients.is_empty() && self.rng.chance(20) {
            let first = &self.clients[self.rng.below(self.clients.len())];
            let same = |work: &&Work| work.request.prompt == first.request().prompt;
            if let Some(same) = self.works.iter().find(same) {
                work = same.clone();
                work.request.same_prompt_as = Some(first.stream.id());
            }
        }
        work
    }

    /// Handles the result of a submit, made while `queued` requests were queued and `failures` steps had failed by
    /// chance.
    pub(super) fn take(
        &mut self,
        work: Work,
        submitted: Result<TokenStream, SubmitError>,
        queued: RangeInclusive<u64>,
        failures: u64,
    ) {
        let most = self.config.max_queued as u64;
        let stream = match submitted {
            Ok(stream) => stream,
            Err(SubmitError::QueueFull { .. }) => {
                assert!(queued.end() + self.resets.len() as u64 >= most, "refused with {queued:?} of {most} requests");
                self.report.refused += 1;
                return;
            }
            Err(error) => panic!("{error}"),
        };
        assert!(*queued.start() < most, "the queue has no end");
        self.report.requests += 1;
        self.woken = true;
        let slow = self.faults.happens(Fault::SlowClient, 400);
        let pace = match self.faults.below(Fault::SlowClient, 2) {
            0 if slow => Pace::Slow,
            1 if slow => Pace::Stalled,
            _ => Pace::AtOnce,
        };
        let refused_from = self.faults.happens(Fault::RefusedRow, 60).then(|| {
            let tokens = work.request.prompt.len() + work.request.max_tokens;
            let from = self.faults.below(Fault::RefusedRow, tokens);
            self.engine.engine().engine.executor().refused.insert(stream.id(), from);
            from
        });
        self.clients.push(Client::new(stream, work, pace, (failures, refused_from)));
    }
}
