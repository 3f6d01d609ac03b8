//! The workloads of a simulation: `bench`'s with the same seed, and traces.

use super::args::SimArgs;
use super::simulation::Simulation;
use super::world::{FrontEnd, Requests, Run, Sending, SessionStart, Turn};
use crate::bench::args::PER_CLIENT;
use crate::bench::replay::chains;
use crate::bench::workload::{Arrivals, Point, WARM_UP_RUN, delays, prompt, scaled};
use crate::traces::Trace;
use crate::traces::request::TraceRequest;
use anyhow::{Result, bail, ensure};
use pegainfer_core::rng;
use std::time::Duration;

/// Maximum number of requests in a run.
const MAX_REQUESTS: usize = 10_000_000;
/// Maximum number of tokens in a prompt or an output, more than any model's context.
const MAX_TOKENS: usize = 1 << 26;

/// A workload.
#[derive(Debug, Clone)]
pub enum Workload {
    /// A workload of `bench`.
    Point(Point),
    /// A trace, sent as recorded or by sessions, at `speed` times its rate.
    Trace {
        /// The trace.
        trace: Trace,
        /// Same as [`SimArgs::sessions`].
        sessions: bool,
        /// Same as [`SimArgs::speed`].
        speed: f64,
    },
}

/// The workloads set by the flags.
pub fn workloads(args: &SimArgs) -> Result<Vec<Workload>> {
    check(args)?;
    let (prompt_len, output_len) = (args.prompt_len.get(), args.output_len.get());
    let point = |arrivals, requests| Workload::Point(Point { arrivals, requests, prompt_len, output_len });
    let asked = args.requests.map(usize::from);
    let closed = |streams: usize| point(Arrivals::Closed { streams }, asked.unwrap_or(PER_CLIENT.get() * streams));
    let nothing = args.concurrency.is_empty() && args.burst.is_empty() && args.qps.is_empty() && args.trace.is_none();
    let streams = if nothing { vec![1, 8] } else { args.concurrency.iter().map(|n| n.get()).collect() };
    let mut all: Vec<Workload> = streams.into_iter().map(closed).collect();
    all.extend(args.burst.iter().map(|n| point(Arrivals::Burst, n.get())));
    all.extend(args.qps.iter().map(|&qps| Workload::Point(Point::poisson(qps, args.requests, prompt_len, output_len))));
    if let Some(path) = &args.trace {
        let trace = Trace::read_first(path, asked.unwrap_or(usize::MAX))?;
        ensure!(!trace.requests.is_empty(), "{} has no requests", path.display());
        all.push(Workload::Trace { trace, sessions: args.sessions, speed: args.speed });
    }
    Ok(all)
}

/// Refuses numbers for which a simulation would never end.
fn check(args: &SimArgs) -> Result<()> {
    let counts = [("--concurrency", &args.concurrency), ("--burst", &args.burst)];
    let counts = counts.into_iter().flat_map(|(flag, numbers)| numbers.iter().map(move |number| (flag, number.get())));
    let requests = args.requests.map(|requests| ("--requests", requests.get()));
    for (flag, number) in counts.chain(requests) {
        ensure!(number <= MAX_REQUESTS, "{flag} {number}: a simulation has at most {MAX_REQUESTS} requests");
    }
    for (flag, tokens) in [("--prompt-len", args.prompt_len.get()), ("--output-len", args.output_len.get())] {
        ensure!(tokens <= MAX_TOKENS, "{flag} {tokens}: a request has at most {MAX_TOKENS} tokens");
    }
    Ok(())
}

impl Workload {
    /// Name of its row in a table, name of its line in a plot, and x value on that line.
    pub fn place(&self) -> (String, &'static str, f64) {
        match self {
            Self::Point(point) => point.place(),
            Self::Trace { trace, speed, .. } => (format!("{} trace", trace.format.name), "trace", *speed),
        }
    }

    /// True for Poisson arrivals.
    pub fn is_poisson(&self) -> bool {
        matches!(self, Self::Point(Point { arrivals: Arrivals::Poisson { .. }, .. }))
    }

    /// Number of requests in a run.
    pub fn requests(&self) -> usize {
        match self {
            Self::Point(point) => point.requests,
            Self::Trace { trace, .. } => trace.requests.len(),
        }
    }

    /// Mean prompt and output lengths in tokens.
    pub fn mean_lengths(&self) -> (f64, f64) {
        match self {
            Self::Point(point) => (point.prompt_len as f64, point.output_len as f64),
            Self::Trace { trace, .. } => {
                let (prompt, output) = trace
                    .requests
                    .iter()
                    .fold((0, 0), |sum, request| (sum.0 + request.prompt_len, sum.1 + request.output_len));
                let requests = trace.requests.len().max(1) as f64;
                (prompt as f64 / requests, output as f64 / requests)
            }
        }
    }

    /// Runs it once, with the prompts and arrival times of `seed`.
    pub fn run(&self, simulation: &Simulation, seed: u64, timeline: bool) -> Result<Run> {
        match self {
            Self::Point(point) => run_point(simulation, *point, seed, timeline),
            Self::Trace { trace, sessions, speed } => {
                let sending = Sending::Sessions(starts(&trace.requests, *sessions, *speed));
                let vocab = simulation.header.vocab_size;
                let of = |i: usize| &trace.requests[i];
                let requests = Requests {
                    count: trace.requests.len(),
                    sending,
                    lengths: &|i| (of(i).prompt_len, of(i).output_len),
                    prompt: &|i| of(i).prompt(vocab, seed).into(),
                };
                let (lengths, prompt) = (requests.lengths, requests.prompt);
                let no_warm_up = Requests { count: 0, sending: Sending::At(vec![]), lengths, prompt };
                simulation.run(&no_warm_up, &requests, FrontEnd::HTTP, timeline)
            }
        }
    }
}

/// Runs a workload of `bench`, after its warm-up.
fn run_point(simulation: &Simulation, point: Point, seed: u64, timeline: bool) -> Result<Run> {
    let vocab = simulation.header.vocab_size;
    let (sending, front_end) = match point.arrivals {
        Arrivals::Closed { streams } => (Sending::Closed(streams), FrontEnd::default()),
        Arrivals::Burst => (Sending::At(vec![Duration::ZERO; point.requests]), FrontEnd::default()),
        Arrivals::Poisson { .. } => (Sending::At(delays(point, seed)), FrontEnd::HTTP),
        Arrivals::Trace { .. } => bail!("a point does not have the requests of its trace"),
    };
    let lengths = &|_| (point.prompt_len, point.output_len);
    let (warm_up_seed, before) = (rng::bits(seed, WARM_UP_RUN), point.warm_up());
    let warm_up = Requests {
        count: before.requests,
        sending: Sending::At(vec![Duration::ZERO; before.requests]),
        lengths: &|_| (before.prompt_len, before.output_len),
        prompt: &|i| prompt(before, vocab, warm_up_seed, i),
    };
    let requests = Requests { count: point.requests, sending, lengths, prompt: &|i| prompt(point, vocab, seed, i) };
    simulation.run(&warm_up, &requests, front_end, timeline)
}

/// Send times of `bench replay`. The first request of a session is sent at its time. Each other one is sent after its
/// delay from the end of the previous one, or at its own time if the trace has no delay, but not before the previous
/// one ends.
fn starts(requests: &[TraceRequest], sessions: bool, speed: f64) -> Vec<SessionStart> {
    let mut starts: Vec<SessionStart> =
        requests.iter().map(|request| SessionStart::At(scaled(request.at, speed))).collect();
    for chain in chains(requests, sessions) {
        for pair in chain.windows(2) {
            let (previous, request) = (pair[0], &requests[pair[1]]);
            let (delay, earliest) = match request.delay {
                Some(delay) => (delay, Duration::ZERO),
                None => (Duration::ZERO, request.at),
            };
            let turn = Turn { previous, delay: scaled(delay, speed), earliest: scaled(earliest, speed) };
            starts[pair[1]] = SessionStart::After(turn);
        }
    }
    starts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::workload::MAX_WAIT;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn sessions_start_as_in_a_replay() {
        let request = |at, session, delay| TraceRequest { at: ms(at), session, delay, ..TraceRequest::default() };
        let a = Some(7);
        let requests = [
            request(0, a, None),
            request(10, None, None),
            request(20, a, None),
            request(30, Some(8), Some(ms(9))),
            request(40, a, Some(ms(6))),
        ];
        let at = |ms| SessionStart::At(self::ms(ms));
        let after = |previous, delay, earliest| {
            SessionStart::After(Turn { previous, delay: ms(delay), earliest: ms(earliest) })
        };
        assert_eq!(starts(&requests, true, 2.0), [at(0), at(5), after(0, 0, 10), at(15), after(2, 3, 0)]);
        assert_eq!(starts(&requests, false, 1.0), [0, 10, 20, 30, 40].map(at));
        assert!(starts(&requests, true, 1e-300).contains(&SessionStart::At(MAX_WAIT)), "no speed is too low");
    }
}
