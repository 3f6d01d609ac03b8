//! A device that computes nothing, and takes the ledger's predicted time on a clock of its own.

use super::tiers::Links;
use pegainfer_core::engine::{Clock, SimulatedClock};
use pegainfer_core::kv::tiers::{Transfer, TransferDone};
use pegainfer_core::ledger::{HostCost, Law, OpShares, StepKind, StepLoad};
use pegainfer_core::schedule::{Outcome, SequenceState, Step, StepExecutor};
use pegainfer_core::tensor::OpError;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

/// Id of every sampled token. Simulated requests ignore end-of-text tokens.
const TOKEN: u32 = 0;

/// A simulated device with an engine thread that also takes time.
#[derive(Debug)]
pub struct SimulatedDevice<S> {
    law: Law,
    /// Factor of the law's times.
    pace: f64,
    host: HostCost,
    depth: usize,
    /// Start of the clock.
    epoch: Instant,
    clock: SimulatedClock,
    /// Time at which the device has finished all launched steps.
    free_at: Duration,
    /// For each step in flight, its end time and its number of samples.
    in_flight: VecDeque<(Duration, usize)>,
    shares: OpShares,
    tally: Tally,
    /// Recorded steps, if requested.
    timeline: Option<Vec<SimulatedStep>>,
    /// Copies of KV blocks, of an engine that keeps some.
    links: Option<Links>,
    state: PhantomData<fn() -> S>,
}

/// Totals of the device's work.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    /// Number of steps by kind, in the order of [`StepKind::ALL`].
    pub steps: [u64; 3],
    /// Seconds of steps by kind.
    pub seconds: [f64; 3],
    /// Seconds of steps that the ledger does not cover.
    pub uncovered: f64,
    /// Number of steps that the ledger does not cover.
    pub uncovered_steps: u64,
    /// Seconds of each op, in the order of [`OpShares::names`].
    pub ops: Vec<f64>,
}

/// A step of the timeline.
#[derive(Debug, Clone, Copy)]
pub struct SimulatedStep {
    /// Start time on the simulation's clock.
    pub begin: Duration,
    /// End time.
    pub end: Duration,
    /// Load of the step.
    pub load: StepLoad,
    /// Number of the engine.
    pub engine: usize,
}

impl<S> SimulatedDevice<S> {
    /// An idle device at time zero.
    pub fn new(law: Law, host: HostCost, depth: usize, shares: OpShares, timeline: bool) -> Self {
        let epoch = Instant::now();
        Self {
            law,
            pace: 1.0,
            host,
            depth,
            epoch,
            clock: SimulatedClock::new(epoch),
            free_at: Duration::ZERO,
            in_flight: VecDeque::new(),
            shares,
            tally: Tally::default(),
            timeline: timeline.then(Vec::new),
            links: None,
            state: PhantomData,
        }
    }

    /// The device with all times of steps multiplied by `pace`.
    pub fn at_pace(self, pace: f64) -> Self {
        Self { pace, ..self }
    }

    /// The device of an engine that keeps copies of KV blocks, over these links.
    pub fn with_links(self, links: Option<Links>) -> Self {
        Self { links, ..self }
    }

    /// Time since the start of the clock.
    pub fn elapsed(&self) -> Duration {
        self.clock.elapsed()
    }

    /// A simulated time as an `Instant`.
    pub fn instant(&self, at: Duration) -> Instant {
        self.epoch + at
    }

    /// Lets an idle host wait until `at`.
    pub fn wait_until(&mut self, at: Duration) {
        self.clock.advance_to_elapsed(at);
    }

    /// Totals since the last call, and the recorded steps.
    pub fn take_results(&mut self) -> (Tally, Vec<SimulatedStep>) {
        let timeline = self.timeline.as_mut().map(std::mem::take);
        (std::mem::take(&mut self.tally), timeline.unwrap_or_default())
    }
}

impl<S: SequenceState> StepExecutor for SimulatedDevice<S> {
    type State = S;

    fn useful_depth(&self) -> usize {
        self.depth
    }

    fn launch(&mut self, step: &Step<S::Row>) -> Result<(), OpError> {
        let load = StepLoad::of(step);
        self.clock.advance(microseconds(self.host.step_us + self.host.row_us * step.rows.len() as f64));
        let predicted = self.law.time(&load);
        let us = predicted.us * self.pace;
        let begin = self.elapsed().max(self.free_at);
        let end = begin + microseconds(us);
        self.free_at = end;
        self.in_flight.push_back((end, step.samples.len()));
        self.tally.count(&load, us, predicted.covered, &self.shares);
        if let Some(timeline) = &mut self.timeline {
            timeline.push(SimulatedStep { begin, end, load, engine: 0 });
        }
        Ok(())
    }

    /// Sampling is included in the step's time.
    fn sample(&mut self, _: &Step<S::Row>) -> Result<(), OpError> {
        Ok(())
    }

    fn finish(&mut self) -> Result<Outcome, OpError> {
        let none = || OpError { op: "simulated device", message: "no step is in flight".to_owned() };
        let (end, samples) = self.in_flight.pop_front().ok_or_else(none)?;
        self.clock.advance_to_elapsed(end);
        Ok(Outcome { tokens: vec![TOKEN; samples], ..Outcome::default() })
    }

    fn abandon(&mut self) -> Result<(), OpError> {
        self.in_flight.clear();
        Ok(())
    }

    fn clock(&self) -> Clock {
        Clock::Simulated(self.clock.clone())
    }

    fn now(&self) -> Instant {
        self.clock.now()
    }

    fn rest(&mut self, time: Duration) {
        self.clock.advance(time);
    }

    fn start_transfer(&mut self, transfer: Transfer) {
        let now = self.elapsed();
        if let Some(links) = &mut self.links {
            links.start(&transfer, now, self.free_at);
        }
    }

    fn finished_transfers(&mut self) -> Vec<TransferDone> {
        let now = self.elapsed();
        self.links.as_mut().map_or_else(Vec::new, |links| links.finished(now))
    }

    fn wait_for_transfers(&mut self, limit: Duration) {
        let until = self.elapsed() + limit;
        let next = self.links.as_ref().and_then(Links::next_end);
        self.clock.advance_to_elapsed(next.map_or(until, |next| next.min(until)));
    }
}

impl Tally {
    fn count(&mut self, load: &StepLoad, us: f64, covered: bool, shares: &OpShares) {
        let (kind, seconds) = (load.kind(), us / 1e6);
        let i = StepKind::ALL.iter().position(|other| *other == kind).unwrap_or_default();
        self.steps[i] += 1;
        self.seconds[i] += seconds;
        if !covered {
            self.uncovered += seconds;
            self.uncovered_steps += 1;
        }
        shares.add(load, seconds, &mut self.ops);
    }

    /// Adds the totals of another device.
    pub fn add(&mut self, other: &Self) {
        self.steps.iter_mut().zip(other.steps).for_each(|(sum, steps)| *sum += steps);
        self.seconds.iter_mut().zip(other.seconds).for_each(|(sum, seconds)| *sum += seconds);
        self.uncovered += other.uncovered;
        self.uncovered_steps += other.uncovered_steps;
        self.ops.resize(self.ops.len().max(other.ops.len()), 0.0);
        self.ops.iter_mut().zip(&other.ops).for_each(|(sum, seconds)| *sum += seconds);
    }

    /// Seconds that the device was busy.
    pub fn busy(&self) -> f64 {
        self.seconds.iter().sum()
    }
}

fn microseconds(us: f64) -> Duration {
    Duration::from_nanos((us * 1e3) as u64)
}
