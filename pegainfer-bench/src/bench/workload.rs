//! Workloads: send times and prompts of requests.

use super::args::Workload;
use super::cells::Cell;
use super::client::Client;
use super::sampling::Sampling;
use super::stats::{Completion, Figures, Measurements};
use anyhow::{Result, bail};
use pegainfer_core::rng;
use serde::Serialize;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Maximum number of requests in the warm-up of an open loop, all at the same time.
const WARM_UP_REQUESTS: usize = 64;
/// Maximum number of tokens of each request in a warm-up: later steps of its decode do nothing for the first time.
pub const WARM_UP_TOKENS: usize = 8;
/// Default duration of `serve`'s arrivals, in seconds.
const SECONDS: f64 = 15.0;
/// Default minimum of requests in a run of `serve`.
const MIN_ARRIVALS: usize = 40;
/// Default maximum of requests in a run of `serve`: their prompts are in memory, 4 bytes per token.
const MAX_ARRIVALS: usize = 100_000;
/// Run number of the warm-up. No measured run has its prompts.
pub const WARM_UP_RUN: u64 = u64::MAX;

/// Maximum delay of a request.
pub const MAX_WAIT: Duration = Duration::from_secs(365 * 24 * 3600);

/// Arrival process of requests.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "arrivals")]
pub enum Arrivals {
    /// Closed loop: a request is sent when another one ends.
    Closed {
        /// Number of concurrent requests.
        streams: usize,
    },
    /// All requests at the same time.
    Burst,
    /// Open loop: random arrivals, independent of each other and of the responses.
    Poisson {
        /// Mean arrival rate in requests per second.
        qps: f64,
    },
    /// The arrivals of a trace.
    Trace {
        /// Divisor of its times.
        speed: f64,
        /// True if a session's next request follows the response to the previous one.
        sessions: bool,
    },
}

/// One measurement point of a benchmark.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Point {
    /// Arrival process.
    #[serde(flatten)]
    pub arrivals: Arrivals,
    /// Number of requests per run.
    pub requests: usize,
    /// Prompt length of each request in tokens; the mean for a trace.
    pub prompt_len: usize,
    /// Output length of each request in tokens; the mean for a trace.
    pub output_len: usize,
}

impl Point {
    /// Poisson arrivals. The default number of `requests` is that of [`SECONDS`], at least [`MIN_ARRIVALS`] and at most
    /// [`MAX_ARRIVALS`].
    pub fn poisson(qps: f64, requests: Option<NonZeroUsize>, prompt_len: usize, output_len: usize) -> Self {
        let arrivals = ((qps * SECONDS) as usize).clamp(MIN_ARRIVALS, MAX_ARRIVALS);
        let requests = requests.map_or(arrivals, NonZeroUsize::get);
        Self { arrivals: Arrivals::Poisson { qps }, requests, prompt_len, output_len }
    }

    /// Name of its row in a table, name of its line in a plot, and x value on that line.
    pub fn place(&self) -> (String, &'static str, f64) {
        match self.arrivals {
            Arrivals::Closed { streams } => (format!("concurrency {streams}"), "closed loop", streams as f64),
            Arrivals::Burst => (format!("burst of {}", self.requests), "burst", self.requests as f64),
            Arrivals::Poisson { qps } => (format!("{} qps", short(qps)), "Poisson", qps),
            Arrivals::Trace { speed, .. } => (format!("speed {}", short(speed)), "trace", speed),
        }
    }

    /// The requests that are sent before the point is measured.
    pub fn warm_up(self) -> Self {
        let output_len = self.output_len.min(WARM_UP_TOKENS);
        match self.arrivals {
            Arrivals::Closed { streams } => Self { requests: streams, output_len, ..self },
            _ => {
                let requests = self.requests.min(WARM_UP_REQUESTS);
                Self { requests, arrivals: Arrivals::Burst, output_len, ..self }
            }
        }
    }
}

impl From<Cell> for Point {
    fn from(Cell { prompt_len, output_len, streams, requests }: Cell) -> Self {
        Self { arrivals: Arrivals::Closed { streams }, requests, prompt_len, output_len }
    }
}

/// A rate as typed, or with an exponent if it has many digits.
fn short(rate: f64) -> String {
    if (1e-4..1e9).contains(&rate) { rate.to_string() } else { format!("{rate:e}") }
}

impl Workload {
    /// The measurement points of the sweep, in order. A trace's points depend on its requests, see
    /// [`replay`](super::replay).
    pub fn points(&self) -> Vec<Point> {
        let closed = |streams: usize, requests: usize, prompt_len: NonZeroUsize, output_len: NonZeroUsize| Point {
            arrivals: Arrivals::Closed { streams },
            requests: streams * requests,
            prompt_len: prompt_len.get(),
            output_len: output_len.get(),
        };
        match self {
            Self::Latency(args) => {
                let outputs = |prompt| args.output_len.iter().map(move |&output| (prompt, output));
                let pairs = args.prompt_len.iter().flat_map(|&prompt| outputs(prompt));
                pairs.map(|(prompt, output)| closed(1, args.requests.get(), prompt, output)).collect()
            }
            Self::Throughput(args) => {
                let default = [1, 8].map(|n| NonZeroUsize::MIN.saturating_add(n - 1));
                let streams = match args.concurrency.is_empty() && args.burst.is_empty() {
                    true => &default[..],
                    false => &args.concurrency,
                };
                let (prompt, output) = (args.prompt_len, args.output_len);
                let closed = streams.iter().map(|n| closed(n.get(), args.requests.get(), prompt, output));
                let burst = args.burst.iter().map(|n| Point {
                    arrivals: Arrivals::Burst,
                    requests: n.get(),
                    prompt_len: prompt.get(),
                    output_len: output.get(),
                });
                closed.chain(burst).collect()
            }
            Self::Serve(args) => {
                let (prompt, output) = (args.prompt_len.get(), args.output_len.get());
                args.qps.iter().map(|&qps| Point::poisson(qps, args.requests, prompt, output)).collect()
            }
            Self::Prefix(args) => {
                let point = |&prompt| closed(1, args.requests.get(), prompt, args.output_len);
                args.prompt_len.iter().map(point).collect()
            }
            Self::Replay(_) => Vec::new(),
            Self::Cells(args) => args.cells().into_iter().map(Point::from).collect(),
        }
    }

    /// Number of times each prompt is sent in a run. The second pass hits the prefix cache.
    pub fn passes(&self) -> usize {
        if matches!(self, Self::Prefix(_)) { 2 } else { 1 }
    }
}

/// Measures a point in `runs` runs after a warm-up. Returns the metrics of each run, for each pass over its prompts or
/// for each group of requests with the same sampling. Token ids are below `vocab`. Prompts of different seeds, runs or
/// requests are different.
pub async fn measure(
    client: &Arc<Client>,
    (point, sampling): (Point, Sampling),
    passes: usize,
    runs: usize,
    vocab: usize,
    seed: u64,
) -> Result<Vec<Vec<Figures>>> {
    let (warm_up, start) = (point.warm_up(), Instant::now());
    run(client, (warm_up, sampling), prompts(warm_up, vocab, rng::bits(seed, WARM_UP_RUN)), &[]).await?;
    log::info!("warm-up: {} requests in {:.1} s", warm_up.requests, start.elapsed().as_secs_f64());
    let groups = sampling.groups().len();
    let mut figures = vec![Vec::with_capacity(runs); passes * groups];
    for r in 0..runs as u64 {
        let seed = rng::bits(seed, r);
        let prompts = prompts(point, vocab, seed);
        let (delays, start) = (delays(point, seed), Instant::now());
        for pass in figures.chunks_mut(groups) {
            let measured = run(client, (point, sampling), prompts.clone(), &delays).await?;
            pass.iter_mut().zip(measured).for_each(|(group, figures)| group.push(figures));
        }
        let (requests, seconds) = (passes * point.requests, start.elapsed().as_secs_f64());
        log::info!("run {} of {runs}: {requests} requests in {seconds:.1} s", r + 1);
    }
    Ok(figures)
}

type Prompts = Arc<Vec<Arc<[u32]>>>;

fn prompts(point: Point, vocab: usize, seed: u64) -> Prompts {
    Arc::new((0..point.requests).map(|request| prompt(point, vocab, seed, request)).collect())
}

/// The prompt of a request of a run.
pub fn prompt(point: Point, vocab: usize, seed: u64, request: usize) -> Arc<[u32]> {
    let mut prompt: Arc<[u32]> = std::iter::repeat_n(0, point.prompt_len).collect();
    if let Some(ids) = Arc::get_mut(&mut prompt) {
        rng::fill_below(rng::bits(seed, request as u64), vocab as u32, ids);
    }
    prompt
}

/// Send times of the requests of an open loop, from the start of the run; empty for other arrival processes.
pub fn delays(point: Point, seed: u64) -> Vec<Duration> {
    let Arrivals::Poisson { qps } = point.arrivals else { return Vec::new() };
    let mut at = 0.0;
    let next = |request: u64| {
        // The prompts use the unmodified seed.
        at += exponential(!seed, request);
        scaled(Duration::from_secs_f64(at), qps)
    };
    (0..point.requests as u64).map(next).collect()
}

/// A random number of the exponential distribution with mean 1.
pub fn exponential(seed: u64, position: u64) -> f64 {
    // In (0, 1], so that its logarithm is finite.
    let uniform = (rng::below(rng::bits(seed, position), 1 << 53) + 1) as f64 / (1u64 << 53) as f64;
    -uniform.ln()
}

/// A time at `speed` times its rate, at most [`MAX_WAIT`].
pub fn scaled(time: Duration, speed: f64) -> Duration {
    Duration::try_from_secs_f64(time.as_secs_f64() / speed).map_or(MAX_WAIT, |time| time.min(MAX_WAIT))
}

/// Runs once: sends every prompt and waits for all responses. Returns the metrics of each group of requests.
async fn run(
    client: &Arc<Client>,
    (point, sampling): (Point, Sampling),
    prompts: Prompts,
    delays: &[Duration],
) -> Result<Vec<Figures>> {
    let mut tasks = JoinSet::new();
    let start = Instant::now();
    match point.arrivals {
        Arrivals::Closed { streams } => {
            let next = Arc::new(AtomicUsize::new(0));
            for _ in 0..streams {
                tasks.spawn(stream(client.clone(), prompts.clone(), next.clone(), (point.output_len, sampling)));
            }
        }
        Arrivals::Burst | Arrivals::Poisson { .. } | Arrivals::Trace { .. } => {
            for request in 0..prompts.len() {
                if let Some(delay) = delays.get(request) {
                    tokio::time::sleep_until((start + *delay).into()).await;
                }
                let (client, prompts) = (client.clone(), prompts.clone());
                let fields = sampling.fields(request, point.output_len);
                let complete = async move { client.complete(&prompts[request], point.output_len, &fields).await };
                tasks.spawn(async move { vec![(request, complete.await)] });
            }
        }
    }
    let (results, wall) = (tasks.join_all().await, start.elapsed());
    let mut groups: Vec<Vec<_>> = sampling.groups().iter().map(|_| Vec::new()).collect();
    results.into_iter().flatten().for_each(|(request, result)| groups[sampling.group(request)].push(result));
    groups.into_iter().map(|results| figures(results.into_iter(), wall)).collect()
}

/// Metrics of a run from the results of its requests; an error if all of them failed.
pub(super) fn figures(results: impl Iterator<Item = Result<Completion>>, wall: Duration) -> Result<Figures> {
    let (mut measurements, mut errors) = (Measurements::default(), Vec::new());
    for result in results {
        match result {
            Ok(completion) => measurements.add(completion),
            Err(error) => errors.push(error),
        }
    }
    let (failed, completed) = (errors.len(), measurements.samples.len());
    match errors.into_iter().next() {
        Some(error) if completed == 0 => bail!(error.context(format!("all {failed} requests failed"))),
        Some(error) => log::warn!("{failed} of {} requests failed, the first one: {error:#}", completed + failed),
        None => {}
    }
    Ok(Figures::new(&measurements, failed, wall))
}

/// One client of a closed loop: sends the next prompt until there are none left.
async fn stream(
    client: Arc<Client>,
    prompts: Prompts,
    next: Arc<AtomicUsize>,
    (output_len, sampling): (usize, Sampling),
) -> Vec<(usize, Result<Completion>)> {
    let mut results = Vec::new();
    loop {
        let request = next.fetch_add(1, Ordering::Relaxed);
        let Some(prompt) = prompts.get(request) else { return results };
        let fields = sampling.fields(request, output_len);
        results.push((request, client.complete(prompt, output_len, &fields).await));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const POINT: Point =
        Point { arrivals: Arrivals::Poisson { qps: 20.0 }, requests: 4000, prompt_len: 8, output_len: 2 };

    #[test]
    fn rates_have_no_zeros_at_the_end() {
        assert_eq!([40.0, 2.5, 0.125, 1e-300].map(short), ["40", "2.5", "0.125", "1e-300"]);
    }

    #[test]
    fn prompts_are_seeded_distinct_and_in_the_vocabulary() {
        let all = prompts(POINT, 1000, 1);
        assert_eq!(all, prompts(POINT, 1000, 1));
        let other = prompts(POINT, 1000, 2);
        let distinct: HashSet<&Arc<[u32]>> = all.iter().chain(other.iter()).collect();
        assert_eq!(distinct.len(), 8000);
        assert!(all.iter().flat_map(|prompt| prompt.iter()).all(|&id| id < 1000));
        assert!(all.iter().flat_map(|prompt| prompt.iter()).any(|&id| id > 990));
    }

    #[test]
    fn poisson_arrivals_keep_their_rate_and_vary_as_they_should() {
        let delays = delays(POINT, 1);
        assert!(delays.is_sorted());
        let gaps: Vec<f64> = delays.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        // The mean of an exponential distribution is its standard deviation: five standard errors, then twice as many.
        assert!((mean * 20.0 - 1.0).abs() < 5.0 / 4000f64.sqrt(), "{mean}");
        assert!((variance.sqrt() * 20.0 - 1.0).abs() < 10.0 / 4000f64.sqrt(), "{variance}");
    }

    #[test]
    fn the_default_number_of_arrivals_is_bounded() {
        let requests = |qps, asked| Point::poisson(qps, NonZeroUsize::new(asked), 8, 2).requests;
        assert_eq!([0.1, 10.0, 1e12, f64::MAX].map(|qps| requests(qps, 0)), [40, 150, 100_000, 100_000]);
        assert_eq!(requests(10.0, 2_000_000), 2_000_000, "what was asked for");
    }

    #[test]
    fn a_warm_up_has_all_streams_and_few_tokens() {
        let (output_len, arrivals) = (100, Arrivals::Closed { streams: 32 });
        let warm_up = Point { arrivals, output_len, ..POINT }.warm_up();
        assert_eq!((warm_up.requests, warm_up.arrivals, warm_up.output_len), (32, arrivals, WARM_UP_TOKENS));
        let warm_up = POINT.warm_up();
        assert_eq!((warm_up.requests, warm_up.arrivals), (WARM_UP_REQUESTS, Arrivals::Burst));
        assert_eq!((warm_up.prompt_len, warm_up.output_len), (8, 2), "those of the point");
    }

    #[test]
    fn times_are_divided_by_the_speed() {
        let at = |speed, seconds| scaled(Duration::from_secs(seconds), speed);
        assert_eq!((at(4.0, 10), at(0.5, 10)), (Duration::from_millis(2500), Duration::from_secs(20)));
        assert_eq!((at(1e-300, 10), at(1e300, 10)), (MAX_WAIT, Duration::ZERO));
        let rare = Point { arrivals: Arrivals::Poisson { qps: 1e-300 }, requests: 3, ..POINT };
        assert_eq!(delays(rare, 1), [MAX_WAIT; 3]);
    }
}
