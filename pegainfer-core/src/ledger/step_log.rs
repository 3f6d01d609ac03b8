//! Times of the steps of a running engine: written by its thread, read by others.

use super::capture::{Capture, EngineDetail, Limits, StepDetail};
use super::drift::DriftWatch;
use super::expert_load::{ExpertCounts, ExpertLoad};
use super::load::{StepKind, StepLoad, StepTime};
use super::watch::{Anomaly, Cause, Watch};
use std::collections::VecDeque;
use std::fmt;
use std::sync::mpsc::SyncSender;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Number of steps kept.
const KEPT: usize = 4096;
/// Upper bounds of the buckets of the histogram in seconds.
const BOUNDS: [f64; 14] = [0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0];
/// Steps of a capture before the slow one.
const CAPTURED: usize = 64;

/// A step that has just ended.
pub struct FinishedStep<'a> {
    /// Load of the step.
    pub load: StepLoad,
    /// Time of its end.
    pub now: Instant,
    /// Measured time.
    pub took: Duration,
    /// Op times, if requested and supported by the device.
    pub ops: &'a [(&'static str, Duration)],
    /// Called only in an investigation.
    pub engine: &'a dyn Fn() -> EngineDetail,
}

impl fmt::Debug for FinishedStep<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { load, took, .. } = self;
        write!(f, "FinishedStep({load:?}, {took:?})")
    }
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
    watch: Option<Watch>,
    drift: DriftWatch,
    /// Steps of the current investigation.
    details: Vec<StepDetail>,
    limits: Limits,
    captures: Option<SyncSender<Capture>>,
    experts: Option<ExpertLoad>,
}

impl StepLog {
    /// An empty log; times are relative to `start`.
    pub fn new(start: Instant) -> Self {
        Self(Mutex::new(Inner {
            start,
            next: 0,
            steps: VecDeque::new(),
            totals: Default::default(),
            anomalies: [0; 4],
            last_anomaly: None,
            watch: None,
            drift: DriftWatch::default(),
            details: Vec::new(),
            limits: Limits::default(),
            captures: None,
            experts: None,
        }))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // The guarded value is plain data: a panic elsewhere cannot leave it half-written.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compares later steps with a ledger.
    pub fn watch(&self, watch: Watch) {
        self.inner().watch = Some(watch);
    }

    /// Sends slow steps from now on to a thread that writes traces and reports; drops them if the queue is full.
    pub fn capture(&self, captures: SyncSender<Capture>) {
        self.inner().captures = Some(captures);
    }

    /// Adds a step. Returns whether to time the ops of the next one.
    pub fn add(&self, step: &FinishedStep<'_>) -> bool {
        let mut inner = self.inner();
        let FinishedStep { load, now, took, ops, engine } = *step;
        let number = inner.next;
        inner.next += 1;
        let predicted_us = inner.watch.as_ref().and_then(|watch| watch.predict(&load));
        let end = now.saturating_duration_since(inner.start);
        if inner.steps.len() == KEPT {
            inner.steps.pop_front();
        }
        inner.steps.push_back(StepTime { number, end, load, took, predicted_us });
        inner.count(load.kind(), took.as_secs_f64(), predicted_us);
        let (Some(us), Some(watch)) = (predicted_us, &mut inner.watch) else {
            return inner.watch.as_ref().is_some_and(Watch::times_ops);
        };
        let anomaly = watch.add_step(number, &load, (took, us), ops);
        let (times_ops, investigates) = (watch.times_ops(), watch.investigates());
        if investigates || anomaly.is_some() {
            inner.details.push(StepDetail { number, ops: ops.to_vec(), engine: engine() });
        } else if let Some(drift) = inner.drift.add_step(&load, end, (took.as_secs_f64() * 1e6 / us).max(1e-9).ln()) {
            // Steps of an investigation are slower because they are timed.
            log::warn!("drift: {drift}");
        }
        if let Some(anomaly) = anomaly {
            inner.report(anomaly, now);
        }
        times_ops
    }

    /// Counts the tokens of the experts of a step.
    pub fn add_experts(&self, counts: &ExpertCounts) {
        self.inner().experts.get_or_insert_default().add(counts);
    }

    /// The load of the experts; `None` before a step was counted, and for models without experts.
    pub fn experts(&self) -> Option<ExpertLoad> {
        self.inner().experts.clone()
    }

    /// The newest `n` steps, oldest first.
    pub fn last(&self, n: usize) -> Vec<StepTime> {
        let inner = self.inner();
        inner.steps.iter().skip(inner.steps.len().saturating_sub(n)).copied().collect()
    }

    /// Seconds of the newest `n` steps by op, as the ledger divides steps like them; empty without a ledger.
    pub fn op_times(&self, n: usize) -> Vec<(String, f64)> {
        let inner = self.inner();
        let Some(watch) = &inner.watch else { return Vec::new() };
        let mut times = Vec::new();
        for step in inner.steps.iter().skip(inner.steps.len().saturating_sub(n)) {
            watch.shares().add(&step.load, step.took.as_secs_f64(), &mut times);
        }
        watch.shares().names().iter().cloned().zip(times).collect()
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

    /// The newest slow step and the result of its investigation.
    pub fn last_anomaly(&self) -> Option<Anomaly> {
        self.inner().last_anomaly.clone()
    }

    /// For each kind: smoothed step time relative to the first reference, and number of drifts of 5 % or more.
    pub fn drifts(&self) -> [(StepKind, f64, u64); 3] {
        let inner = self.inner();
        let (ratios, drifts) = (inner.drift.ratios(), inner.drift.drifts());
        std::array::from_fn(|i| (StepKind::ALL[i], ratios[i], drifts[i]))
    }

    /// When the engine started.
    pub fn start(&self) -> Instant {
        self.inner().start
    }

    /// True if steps are compared with a ledger.
    pub fn is_watched(&self) -> bool {
        self.inner().watch.is_some()
    }
}

impl Inner {
    /// Handles the end of an investigation.
    fn report(&mut self, anomaly: Anomaly, now: Instant) {
        let cause = Cause::ALL.iter().position(|cause| *cause == anomaly.cause).unwrap_or_default();
        self.anomalies[cause] += 1;
        self.last_anomaly = Some(anomaly.clone());
        let details = std::mem::take(&mut self.details);
        let (reported, captured) = self.limits.take(anomaly.cause, now);
        if let Some(captures) = self.captures.as_ref().filter(|_| captured) {
            let before = anomaly.step.saturating_sub(CAPTURED as u64);
            let steps = self.steps.iter().filter(|step| step.number >= before).copied().collect();
            let capture = Capture { anomaly: anomaly.clone(), steps, details, start: self.start };
            // The engine does not wait for a slow disk.
            if captures.try_send(capture).is_ok() {
                return;
            }
        }
        match anomaly.cause {
            Cause::Once => log::debug!("slow {anomaly}"),
            _ if reported => log::warn!("slow {anomaly}"),
            _ => {}
        }
    }

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
    use super::super::capture::RowDetail;
    use super::super::file::OpLine;
    use super::super::law::Law;
    use super::super::load::StepLine;
    use super::super::op_shares::OpShares;
    use super::*;
    use std::sync::mpsc::sync_channel;

    const DECODE: StepLoad = StepLoad { decode_rows: 2, decode_kv: 9, prefill_rows: 0, prefill_tokens: 0, pairs: 0 };
    const PREFILL: StepLoad = StepLoad { decode_rows: 0, decode_kv: 0, prefill_rows: 1, prefill_tokens: 7, pairs: 28 };

    fn no_detail() -> EngineDetail {
        EngineDetail::default()
    }

    fn finished(load: StepLoad, now: Instant, took: Duration) -> FinishedStep<'static> {
        FinishedStep { load, now, took, ops: &[], engine: &no_detail }
    }

    #[test]
    fn steps_are_counted_by_kind_and_the_newest_are_kept() {
        let start = Instant::now();
        let log = StepLog::new(start);
        for i in 0..5000u64 {
            let load = if i % 10 == 0 { PREFILL } else { DECODE };
            let now = start + Duration::from_millis(3 * (i + 1));
            assert!(!log.add(&finished(load, now, Duration::from_millis(3))), "nothing is watched");
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

    /// A log whose decode steps should take 4 ms: 3 ms of linear, 1 ms of attention.
    fn watched(start: Instant) -> StepLog {
        let line = |load, us| StepLine { load, us, spread: 0.0, runs: 1 };
        let law = Law::new(&[line(DECODE, 4000.0), line(PREFILL, 1.0)], false).unwrap();
        let op = |op: &str, us| OpLine { load: DECODE, op: op.into(), calls: 1, us, ..OpLine::default() };
        let log = StepLog::new(start);
        log.watch(Watch::new(law, OpShares::new(&[op("linear", 3000.0), op("attention", 1000.0)])));
        log
    }

    #[test]
    fn a_slow_step_is_captured_with_its_ops_and_requests() {
        let start = Instant::now();
        let log = watched(start);
        let (captures, captured) = sync_channel(1);
        log.capture(captures);
        let (mut now, mut times_ops) = (start, false);
        let row = |request, context| RowDetail { request, label: None, tokens: 1, context };
        let mut step = |attention: u64| {
            let (linear, attention) = (Duration::from_millis(3), Duration::from_millis(attention));
            now += linear + attention;
            let ops = [("linear", linear), ("attention", attention)];
            let engine = || EngineDetail { rows: vec![row(5, 4), row(6, 5)], waiting: 3, kv_blocks_free: 40 };
            let ops = if times_ops { &ops[..] } else { &[] };
            let (load, took) = (DECODE, linear + attention);
            times_ops = log.add(&FinishedStep { load, now, took, ops, engine: &engine });
        };
        (0..100).for_each(|_| step(1));
        (0..40).for_each(|_| step(14));
        let Capture { anomaly, steps, details, .. } = captured.try_recv().unwrap();
        assert_eq!((anomaly.step, anomaly.cause), (100, Cause::Op));
        assert_eq!((steps[0].number, steps.last().unwrap().number), (36, 116));
        assert_eq!((details[0].number, details.len()), (100, 17));
        assert!(details[0].ops.is_empty() && details[16].ops[1] == ("attention", Duration::from_millis(14)));
        let engine = &details[0].engine;
        assert_eq!((&engine.rows[1], engine.waiting, engine.kv_blocks_free), (&row(6, 5), 3, 40));
        let seconds: f64 = log.op_times(10).iter().map(|(_, seconds)| seconds).sum();
        assert!((seconds - 0.17).abs() < 1e-9 && log.op_times(10)[0].0 == "linear", "{seconds}");
        // The second investigation ends within 10 seconds.
        assert!(log.anomalies()[0].1 == 2 && captured.try_recv().is_err());
    }

    #[test]
    fn a_drift_is_counted() {
        let start = Instant::now();
        let (log, mut now) = (watched(start), start);
        for i in 0..90_000 {
            // Below the limit of a slow step.
            let took = Duration::from_micros(if i < 45_000 { 4000 } else { 4800 });
            now += took;
            assert!(!log.add(&finished(DECODE, now, took)));
        }
        let [(_, ratio, drifts), (_, _, none), _] = log.drifts();
        assert!((ratio - 1.2).abs() < 0.01 && (drifts, none) == (1, 0), "{ratio}: {drifts} drifts");
    }
}
