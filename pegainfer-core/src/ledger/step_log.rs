//! Times of the steps of a running engine: written by its thread, read by others.

use super::load::{StepKind, StepLoad};
use super::watch::{Anomaly, Cause, Watch};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Steps that are kept.
const KEPT: usize = 4096;
/// Upper bounds of the buckets of the histogram in seconds.
const BOUNDS: [f64; 14] = [0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0];
/// Least time between two lines of the log about slow steps.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// A step that has run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepTime {
    /// Its number, from 0 on.
    pub number: u64,
    /// When it ended, from the start of the engine on.
    pub end: Duration,
    /// What it asked of the device.
    pub load: StepLoad,
    /// How long it took.
    pub took: Duration,
    /// Predicted microseconds; `None` without a ledger, or beyond what it covers.
    pub predicted_us: Option<f64>,
}

/// Sums over all steps of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepTotals {
    /// Seconds.
    pub seconds: f64,
    /// Seconds of the steps that were predicted.
    pub predictable: f64,
    /// Predicted seconds of these.
    pub predicted: f64,
    /// Steps of each bucket; the last one has those above all bounds.
    steps: [u64; BOUNDS.len() + 1],
}

impl StepTotals {
    /// Number of steps.
    pub fn count(&self) -> u64 {
        self.steps.iter().sum()
    }

    /// Upper bound of each bucket in seconds and the number of its steps; the last bound is infinite.
    pub fn buckets(&self) -> Vec<(f64, u64)> {
        BOUNDS.into_iter().chain([f64::INFINITY]).zip(self.steps).collect()
    }
}

/// The log of an engine.
#[derive(Debug)]
pub struct StepLog(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    start: Instant,
    next: u64,
    steps: VecDeque<StepTime>,
    totals: [StepTotals; 3],
    anomalies: [u64; 4],
    last_anomaly: Option<Anomaly>,
    logged: Option<Instant>,
    watch: Option<Watch>,
}

impl StepLog {
    /// An empty log, whose times count from `start`.
    pub fn new(start: Instant) -> Self {
        let (steps, totals) = (VecDeque::new(), Default::default());
        let (anomalies, last_anomaly, logged, watch) = ([0; 4], None, None, None);
        Self(Mutex::new(Inner { start, next: 0, steps, totals, anomalies, last_anomaly, logged, watch }))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // The guarded value is plain data: a panic elsewhere cannot leave it half-written.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compares steps with a ledger from now on.
    pub fn watch(&self, watch: Watch) {
        self.inner().watch = Some(watch);
    }

    /// Adds a step that ended `now` and took `took`; `ops` as in [`Watch::saw`]. Returns whether to time the ops of the next one.
    pub fn add(&self, load: StepLoad, now: Instant, took: Duration, ops: &[(&'static str, Duration)]) -> bool {
        let mut inner = self.inner();
        let number = inner.next;
        inner.next += 1;
        let predicted_us = inner.watch.as_ref().and_then(|watch| watch.predict(&load));
        let end = now.saturating_duration_since(inner.start);
        if inner.steps.len() == KEPT {
            inner.steps.pop_front();
        }
        inner.steps.push_back(StepTime { number, end, load, took, predicted_us });
        inner.count(load.kind(), took.as_secs_f64(), predicted_us);
        let Some(watch) = &mut inner.watch else { return false };
        let anomaly = predicted_us.and_then(|us| watch.saw(number, &load, (took, us), ops));
        let investigates = watch.investigates();
        if let Some(anomaly) = anomaly {
            let cause = Cause::ALL.iter().position(|cause| *cause == anomaly.cause).unwrap_or_default();
            inner.anomalies[cause] += 1;
            if anomaly.cause == Cause::Once {
                log::debug!("slow {anomaly}");
            } else if inner.logged.is_none_or(|logged| now.saturating_duration_since(logged) >= LOG_INTERVAL) {
                inner.logged = Some(now);
                log::warn!("slow {anomaly}");
            }
            inner.last_anomaly = Some(anomaly);
        }
        investigates
    }

    /// The newest `n` steps, oldest first.
    pub fn last(&self, n: usize) -> Vec<StepTime> {
        let inner = self.inner();
        inner.steps.iter().skip(inner.steps.len().saturating_sub(n)).copied().collect()
    }

    /// Sums of each kind of step.
    pub fn totals(&self) -> [(StepKind, StepTotals); 3] {
        let totals = self.inner().totals;
        std::array::from_fn(|i| (StepKind::ALL[i], totals[i]))
    }

    /// Slow steps by cause.
    pub fn anomalies(&self) -> [(Cause, u64); 4] {
        let anomalies = self.inner().anomalies;
        std::array::from_fn(|i| (Cause::ALL[i], anomalies[i]))
    }

    /// The newest slow step and what was found out about it.
    pub fn last_anomaly(&self) -> Option<Anomaly> {
        self.inner().last_anomaly.clone()
    }

    /// Whether steps are compared with a ledger.
    pub fn is_watched(&self) -> bool {
        self.inner().watch.is_some()
    }
}

impl Inner {
    fn count(&mut self, kind: StepKind, seconds: f64, predicted_us: Option<f64>) {
        let Some(i) = StepKind::ALL.iter().position(|other| *other == kind) else { return };
        let totals = &mut self.totals[i];
        totals.seconds += seconds;
        totals.steps[BOUNDS.partition_point(|bound| *bound < seconds)] += 1;
        if let Some(us) = predicted_us {
            totals.predictable += seconds;
            totals.predicted += us / 1e6;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_counted_by_kind_and_the_newest_are_kept() {
        let start = Instant::now();
        let log = StepLog::new(start);
        let decode = StepLoad { decode_rows: 2, decode_kv: 9, ..StepLoad::default() };
        let prefill = StepLoad { prefill_rows: 1, prefill_tokens: 7, pairs: 28, ..StepLoad::default() };
        for i in 0..5000u64 {
            let load = if i % 10 == 0 { prefill } else { decode };
            let now = start + Duration::from_millis(3 * (i + 1));
            assert!(!log.add(load, now, Duration::from_millis(3), &[]), "nothing is watched");
        }
        let last = log.last(3);
        assert_eq!(last.iter().map(|step| step.number).collect::<Vec<_>>(), [4997, 4998, 4999]);
        assert_eq!((last[2].end, last[2].predicted_us), (Duration::from_secs(15), None));
        assert_eq!(log.last(usize::MAX).len(), KEPT);
        let [(_, decode), (_, prefill), (_, mixed)] = log.totals();
        assert_eq!((decode.count(), prefill.count(), mixed.count()), (4500, 500, 0));
        assert!((prefill.seconds - 1.5).abs() < 1e-9 && prefill.predicted == 0.0);
        assert_eq!(decode.buckets()[3], (0.003, 4500));
    }
}
