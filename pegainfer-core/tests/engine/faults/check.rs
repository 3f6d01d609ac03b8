//! Invariants of a world: after every turn, when the engine is idle, and at the end.

use super::executor::{Spoil, compute_masks};
use super::report::Report;
use super::tap::Ends;
use super::world::World;
use crate::device::blocks_of;
use crate::kinds::StepOf;
use pegainfer_core::engine::simulation::Turn;
use pegainfer_core::engine::{EngineHandle, EngineStats, SubmitError};
use std::task::{Context, Poll, Waker};

impl<K: Spoil + Send + 'static> World<K>
where
    StepOf<K>: Send,
{
    /// Checks after every turn.
    pub(super) fn check(&mut self, turn: Turn) {
        let waker = &mut Context::from_waker(Waker::noop());
        let stopped = turn == Turn::Over;
        self.resets.retain_mut(|reset| match reset.as_mut().poll(waker) {
            Poll::Pending => true,
            Poll::Ready(answer) => {
                assert_eq!(answer, Ok(()));
                false
            }
        });
        assert!(self.resets.is_empty(), "a reset takes longer than a turn");
        let handle = self.handle.as_ref();
        assert!(handle.is_none_or(|handle| handle.is_healthy() != (stopped && handle.failure().is_some())));
        let tap = self.engine.engine();
        // Requests that came during the turn are looked at in the next one, or fail with the device.
        let pending = if stopped { 0 } else { self.arrived_in_turn };
        let taken = tap.ends.sum() + tap.live.len() as u64;
        assert_eq!(taken + pending as u64, self.report.requests, "a request is counted twice or not");
        let stats = tap.engine.scheduler().stats();
        let published = handle.map(EngineHandle::stats);
        assert!(published.is_none_or(|published| EngineStats { waiting: stats.waiting, ..published } == stats));
        let (known, live) = (stats.running + stats.waiting, tap.live.len());
        let in_flight = tap.engine.executor().in_flight().count();
        assert!(if in_flight == 0 { known == live } else { known >= live }, "{known} of {live} requests are known");
        let queued = live + pending;
        assert!(published.is_none_or(|p| p.running + p.waiting == queued.max(p.running)), "{published:?}, {queued}");
        let held = tap.engine.scheduler().held_blocks();
        tap.engine.scheduler().check_blocks().unwrap();
        K::check(tap.engine.scheduler().state());
        assert!(in_flight > 0 || live > 0 || stats.kv_blocks_free == stats.kv_blocks_total, "blocks leaked: {stats:?}");
        let held = |block: u32| held.binary_search(&block).is_ok();
        let mut used = tap.engine.executor().in_flight().flat_map(|step| blocks_of(step, K::BLOCK_TOKENS));
        assert!(used.all(held), "a step in flight uses a free block");
    }

    /// Checks when the engine has ended all requests and still accepts new ones.
    pub(super) fn check_idle(&mut self) {
        let Some(handle) = &self.handle else { return };
        let stats = handle.stats();
        assert_eq!((stats.running, stats.waiting, stats.kv_blocks_free), (0, 0, stats.kv_blocks_total));
        assert!(handle.is_healthy() && handle.failure().is_none());
        self.clock.advance(2 * self.config.step_deadline);
        assert!(handle.is_healthy(), "an idle engine is not stuck");
    }

    /// Checks when the engine loop has ended, because the device is lost or all handles are gone.
    pub(super) fn check_over(&mut self) {
        if let Some(handle) = &self.handle {
            assert_eq!(handle.failure().map(|why| why.ends_with("out of order")), Some(true));
            assert!(!handle.is_healthy());
            let refusal = self.works.first().map(|work| handle.submit(work.request.clone()).unwrap_err());
            assert!(refusal.is_none_or(|refusal| refusal == SubmitError::EngineStopped));
            self.report.lost += 1;
        }
        self.engine.route_all();
        compute_masks(usize::MAX);
        self.read(true);
        assert!(self.clients.is_empty(), "{} streams have no end", self.clients.len());
        let tap = self.engine.engine();
        assert!(tap.live.is_empty(), "{:?} have no end", tap.live);
        let stats = tap.engine.scheduler().stats();
        assert_eq!(
            stats.generation_tokens,
            tap.emitted.values().sum::<usize>() as u64,
            "tokens counted are tokens sent"
        );
        assert_eq!((stats.running, stats.waiting, stats.kv_blocks_free), (0, 0, stats.kv_blocks_total));
        K::check_idle(tap.engine.scheduler().state());
        let (ends, failed_steps) = (tap.ends, tap.failures);
        let stuck = tap.engine.executor().seen_stuck;
        let Ends { aborted, broken, failed, .. } = ends;
        let fatal = u64::from(tap.engine.executor().is_lost());
        assert_eq!(stats.failed_steps + fatal, failed_steps, "failed steps are counted");
        let simulated = self.clock.now() - self.start;
        self.report = Report { stats, aborted, broken, failed, failed_steps, stuck, simulated, ..self.report };
    }
}
