//! Runs the engine over a simulated device: requests arrive, steps run, tokens are stamped, all on the simulation's
//! clock.

use super::device::{SimulatedStep, Tally};
use super::routing::Engines;
use crate::bench::stats::{Measurements, Sample};
use anyhow::{Context, Result};
use pegainfer_core::engine::{
    EngineLimits, EngineStats, EventBatch, GenerateRequest, RequestId, StepEngine, TokenEvent,
};
use pegainfer_core::kv::tiers::TierStats;
use pegainfer_core::schedule::SequenceState;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;
use std::time::Duration;

/// Send times of requests.
#[derive(Debug, Clone)]
pub enum Sending {
    /// Each at its time.
    At(Vec<Duration>),
    /// This many at the start, and another one each time one ends.
    Closed(usize),
    /// Each at its time, or after the end of an earlier one, like the turns of a conversation.
    Sessions(Vec<SessionStart>),
}

/// Send time of a session's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionStart {
    /// At this time.
    At(Duration),
    /// After the end of an earlier request.
    After(Turn),
}

/// The next turn of a session: sent `delay` after the end of the previous request, but not before `earliest`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    /// Number of the previous request.
    pub previous: usize,
    /// Time from the end of the previous request.
    pub delay: Duration,
    /// Time from the start of the run.
    pub earliest: Duration,
}

/// The requests of a simulation.
pub struct Requests<'a> {
    /// Number of requests.
    pub count: usize,
    /// Their send times.
    pub sending: Sending,
    /// Prompt and output length of each request, in tokens.
    pub lengths: &'a dyn Fn(usize) -> (usize, usize),
    /// The prompt of each request.
    pub prompt: &'a dyn Fn(usize) -> Arc<[u32]>,
}

/// Time of HTTP and tokenizer, which does not delay the engine.
#[derive(Debug, Clone, Copy, Default)]
pub struct FrontEnd {
    /// Time from the client to the engine.
    pub request: Duration,
    /// Additional time per prompt token.
    pub token: Duration,
    /// Time from the engine to the client, per event.
    pub event: Duration,
}

impl FrontEnd {
    /// Measured over HTTP on this project's benchmark machine at a concurrency of 16: 0.4 ms of TTFT, and 0.038 us per
    /// prompt token.
    pub const HTTP: Self =
        Self { request: Duration::from_micros(350), token: Duration::from_nanos(38), event: Duration::from_micros(50) };
}

/// Result of a simulation.
#[derive(Debug)]
pub struct Run {
    /// Completed requests, as their clients saw them.
    pub measurements: Measurements,
    /// Number of requests that the engine refused.
    pub refused: usize,
    /// Time from the first request to the end of the last one.
    pub wall: Duration,
    /// Work of the devices.
    pub tally: Tally,
    /// Its recorded steps.
    pub timeline: Vec<SimulatedStep>,
    /// The sums of the engines' counters, including the prefix cache and preemptions of this run.
    pub stats: EngineStats,
    /// Number of engines.
    pub engines: usize,
    /// Peak number of KV blocks held by requests.
    pub peak_blocks: usize,
}

/// Runs all requests to their end, on idle engines. Their ids start at `first_id`.
pub fn run<S: SequenceState>(
    engines: &mut Engines<S>,
    requests: &Requests<'_>,
    front_end: FrontEnd,
    first_id: u64,
) -> Result<Run> {
    let (start, before) = (engines.latest(), stats(engines));
    engines.wait_until(start);
    take_results(engines);
    let mut clients = Clients::new(requests, front_end, engines.all[0].limits(), first_id);
    clients.begin(start);
    let mut peak_blocks = 0;
    loop {
        let busy = engines.next_busy();
        let now = match busy {
            Some((now, _)) => now,
            None => {
                let Some(next) = clients.next_arrival() else { break };
                next
            }
        };
        engines.wait_until(now);
        if clients.next_arrival().is_some_and(|next| next <= now) {
            while let Some(pending) = clients.take_arrived(now) {
                clients.arrive(pending, engines);
            }
            continue;
        }
        let Some((_, i)) = busy else { continue };
        let engine = &mut engines.all[i];
        let events = match engine.plan() {
            Some(admitted) => {
                engine.launch()?;
                admitted
            }
            None => {
                engine.wait();
                engine.finish()?
            }
        };
        let now = engine.executor().elapsed();
        if !events.is_empty() {
            let stats = stats(engines);
            peak_blocks = peak_blocks.max(stats.kv_blocks_total - stats.kv_blocks_free);
        }
        events.iter().for_each(|(id, event)| engines.see(*id, event));
        clients.take(events, now)?;
    }
    let (wall, after) = (engines.latest() - start, stats(engines));
    let (tally, timeline) = take_results(engines);
    let stats = EngineStats {
        prefix_queries: after.prefix_queries - before.prefix_queries,
        prefix_hits: after.prefix_hits - before.prefix_hits,
        preemptions: after.preemptions - before.preemptions,
        tiers: TierStats { hits: after.tiers.hits - before.tiers.hits, ..after.tiers },
        ..after
    };
    let Clients { measurements, refused, .. } = clients;
    Ok(Run { measurements, refused, wall, tally, timeline, stats, engines: engines.all.len(), peak_blocks })
}

/// Sums of the engines' counters.
fn stats<S: SequenceState>(engines: &Engines<S>) -> EngineStats {
    engines.all.iter().map(StepEngine::stats).sum()
}

/// Totals of all devices since the last call, and their recorded steps.
fn take_results<S: SequenceState>(engines: &mut Engines<S>) -> (Tally, Vec<SimulatedStep>) {
    let (mut all, mut timeline) = (Tally::default(), Vec::new());
    for (i, engine) in engines.all.iter_mut().enumerate() {
        let (tally, steps) = engine.executor().take_results();
        all.add(&tally);
        timeline.extend(steps.into_iter().map(|step| SimulatedStep { engine: i, ..step }));
    }
    (all, timeline)
}

/// A request that has not reached the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Pending {
    /// Time at which it reaches the engine.
    arrives: Duration,
    /// Time at which the client sends it.
    sent: Duration,
    /// Its number.
    request: usize,
}

/// A request in the engine.
#[derive(Debug, Clone)]
struct ActiveRequest {
    /// Time at which its client sent it.
    sent: Duration,
    sample: Sample,
}

struct Clients<'a> {
    requests: &'a Requests<'a>,
    front_end: FrontEnd,
    limits: EngineLimits,
    first_id: u64,
    /// Requests with send times known at the start, last arrival first.
    known: Vec<Reverse<Pending>>,
    /// Other requests on their way to the engine, or still to be sent.
    pending: BinaryHeap<Reverse<Pending>>,
    /// Next request of a closed loop.
    next: usize,
    /// Requests that wait for the end of each request. Their `earliest` is on the simulation's clock.
    followers: HashMap<usize, Vec<(usize, Turn)>>,
    /// Client state of each request in the engine, by request number.
    open: Vec<Option<ActiveRequest>>,
    measurements: Measurements,
    refused: usize,
}

impl<'a> Clients<'a> {
    fn new(requests: &'a Requests<'a>, front_end: FrontEnd, limits: EngineLimits, first_id: u64) -> Self {
        Self {
            requests,
            front_end,
            limits,
            first_id,
            known: Vec::new(),
            pending: BinaryHeap::new(),
            next: 0,
            followers: HashMap::new(),
            open: vec![None; requests.count],
            measurements: Measurements::default(),
            refused: 0,
        }
    }

    /// Queues the requests with known send times, counted from `start`.
    fn begin(&mut self, start: Duration) {
        let requests = self.requests;
        match &requests.sending {
            Sending::At(times) => times.iter().enumerate().for_each(|(i, at)| self.send(i, start + *at)),
            Sending::Closed(streams) => {
                self.next = requests.count.min(*streams);
                (0..self.next).for_each(|i| self.send(i, start));
            }
            Sending::Sessions(starts) => {
                for (i, how) in starts.iter().enumerate() {
                    match *how {
                        SessionStart::At(at) => self.send(i, start + at),
                        SessionStart::After(turn) => {
                            let turn = Turn { earliest: start + turn.earliest, ..turn };
                            self.followers.entry(turn.previous).or_default().push((i, turn));
                        }
                    }
                }
            }
        }
        self.known = std::mem::take(&mut self.pending).into_vec();
        self.known.sort_unstable();
    }

    /// Arrival time of the next request at the engine.
    fn next_arrival(&self) -> Option<Duration> {
        let next = self.known.last().max(self.pending.peek());
        next.map(|Reverse(next)| next.arrives)
    }

    /// Takes the next request if it has reached the engine at `now`.
    fn take_arrived(&mut self, now: Duration) -> Option<Pending> {
        let (known, pending) = (self.known.last(), self.pending.peek());
        let (from_known, Reverse(next)) = (known >= pending, known.max(pending)?);
        if next.arrives > now {
            return None;
        }
        let next = if from_known { self.known.pop() } else { self.pending.pop() };
        next.map(|Reverse(next)| next)
    }

    /// Sends request `i` at time `sent`.
    fn send(&mut self, i: usize, sent: Duration) {
        let prompt_len = (self.requests.lengths)(i).0;
        let arrives = sent + self.front_end.request + self.front_end.token * prompt_len as u32;
        self.pending.push(Reverse(Pending { arrives, sent, request: i }));
    }

    /// Submits a request that reached the engine.
    fn arrive<S: SequenceState>(&mut self, pending: Pending, engines: &mut Engines<S>) {
        let Pending { arrives, sent, request: i } = pending;
        let (prompt, output_len) = ((self.requests.prompt)(i), (self.requests.lengths)(i).1);
        let start = engines.all[0].executor().instant(sent);
        let request = GenerateRequest { ignore_eos: true, ..GenerateRequest::greedy(prompt, output_len) };
        if self.limits.check(&request).is_err() {
            self.refused += 1;
            return self.ended(i, arrives);
        }
        let id = RequestId(self.first_id + i as u64);
        let (first, last, prompt) = (Duration::ZERO, Duration::ZERO, request.prompt.len());
        let sample = Sample { start, first, last, prompt, asked: output_len, tokens: 0, cached: 0 };
        self.open[i] = Some(ActiveRequest { sent, sample });
        engines.add(id, request, arrives);
    }

    /// Handles the events of a step, at `now` on the simulation's clock.
    fn take(&mut self, events: EventBatch, now: Duration) -> Result<()> {
        let seen = now + self.front_end.event;
        for (id, event) in &events {
            let i = (id.0 - self.first_id) as usize;
            let ActiveRequest { sent, sample } =
                self.open[i].as_mut().context("an event of a request that has ended")?;
            match event {
                TokenEvent::Token(_) => {
                    let stamp = seen - *sent;
                    match sample.tokens {
                        0 => sample.first = stamp,
                        _ => self.measurements.gaps.add(stamp - sample.last),
                    }
                    (sample.last, sample.tokens) = (stamp, sample.tokens + 1);
                }
                TokenEvent::Finished { usage, .. } => {
                    (sample.tokens, sample.cached) = (usage.completion_tokens, usage.cached_tokens);
                    self.measurements.samples.extend(self.open[i].take().map(|open| open.sample));
                    self.ended(i, seen);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Handles the end of request `i` at `now`: others may follow it.
    fn ended(&mut self, i: usize, now: Duration) {
        if matches!(self.requests.sending, Sending::Closed(_)) && self.next < self.requests.count {
            self.send(self.next, now);
            self.next += 1;
        }
        for (follower, turn) in self.followers.remove(&i).unwrap_or_default() {
            self.send(follower, (now + turn.delay).max(turn.earliest));
        }
    }
}
