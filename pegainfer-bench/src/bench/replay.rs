//! The requests of a trace as load: at their own times, or session by session.

use super::args::ReplayArgs;
use super::client::Client;
use super::stats::{Completion, Figures};
use super::workload::{Arrivals, Point, WARM_UP_RUN, WARM_UP_TOKENS, figures, scaled};
use crate::traces::Trace;
use crate::traces::request::TraceRequest;
use anyhow::{Result, ensure};
use pegainfer_core::rng;
use serde::Serialize;
use std::collections::HashMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Number of concurrent requests in the warm-up.
const WARM_UP_REQUESTS: usize = 16;

/// A trace to replay.
pub struct Replay {
    requests: Arc<Vec<TraceRequest>>,
    speeds: Vec<f64>,
    sessions: bool,
    summary: TraceSummary,
}

/// Summary of the replayed trace.
#[derive(Debug, Clone, Serialize)]
pub struct TraceSummary {
    /// Path of the file.
    pub file: String,
    /// Name of its format.
    pub format: &'static str,
    /// Column or field of its times, and their unit.
    pub time: &'static str,
    /// Number of requests sent per run.
    pub requests: usize,
    /// Number of skipped requests: without a prompt, output or end.
    pub skipped: usize,
    /// Number of skipped requests longer than the model's context.
    pub too_long: usize,
    /// Time from the first arrival to the last one at speed 1, in seconds.
    pub seconds: f64,
}

/// Shared state of a run's requests.
#[derive(Clone, Copy)]
struct Run {
    start: Instant,
    speed: f64,
    vocab: usize,
    seed: u64,
}

impl Replay {
    /// Reads the trace of these flags.
    pub fn read(args: &ReplayArgs) -> Result<Self> {
        let trace = Trace::read_first(&args.file, args.requests.map_or(usize::MAX, NonZeroUsize::get))?;
        let summary = TraceSummary {
            file: args.file.display().to_string(),
            format: trace.format.name,
            time: trace.format.time,
            requests: trace.requests.len(),
            skipped: trace.skipped,
            too_long: 0,
            seconds: trace.duration().as_secs_f64(),
        };
        ensure!(!trace.requests.is_empty(), "{} has no request with a prompt and output", summary.file);
        let (speeds, sessions) = (args.speed.clone(), args.sessions);
        Ok(Self { requests: Arc::new(trace.requests), speeds, sessions, summary })
    }

    /// Removes the requests that are longer than the model's context, if that is known.
    pub fn fit(&mut self, max_model_len: Option<usize>) -> Result<()> {
        let Some(context) = max_model_len else { return Ok(()) };
        let fits = |request: &&TraceRequest| request.prompt_len.saturating_add(request.output_len) <= context;
        let mut requests: Vec<TraceRequest> = self.requests.iter().filter(fits).cloned().collect();
        let summary = &mut self.summary;
        ensure!(
            !requests.is_empty(),
            "all requests of {} are longer than the context of {context} tokens",
            summary.file
        );
        let start = requests[0].at;
        requests.iter_mut().for_each(|request| request.at -= start);
        summary.seconds = requests.last().map_or(0.0, |request| request.at.as_secs_f64());
        summary.too_long = self.requests.len() - requests.len();
        summary.requests = requests.len();
        self.requests = Arc::new(requests);
        Ok(())
    }

    /// The measurement points, each with its speed.
    pub fn points(&self) -> Vec<(Point, f64)> {
        let requests = self.requests.len();
        let mean = |length: fn(&TraceRequest) -> usize| {
            (self.requests.iter().map(|request| length(request) as f64).sum::<f64>() / requests as f64).round() as usize
        };
        let (prompt_len, output_len) = (mean(|request| request.prompt_len), mean(|request| request.output_len));
        let sessions = self.sessions;
        let point = |speed| Point { arrivals: Arrivals::Trace { speed, sessions }, requests, prompt_len, output_len };
        self.speeds.iter().map(|&speed| (point(speed), speed)).collect()
    }

    /// Replays the trace `runs` times at one of its speeds, after a warm-up. Prompts hit the prefix cache only if the
    /// same run sent them before.
    pub async fn measure(
        &self,
        client: &Arc<Client>,
        speed: f64,
        runs: usize,
        vocab: usize,
        seed: u64,
    ) -> Result<Vec<Figures>> {
        let run = |r| Run { start: Instant::now(), speed, vocab, seed: rng::bits(seed, r) };
        let warm_up = self.requests.iter().take(WARM_UP_REQUESTS).map(|request| TraceRequest {
            at: Duration::ZERO,
            output_len: request.output_len.min(WARM_UP_TOKENS),
            ..request.clone()
        });
        replay(client, &Arc::new(warm_up.collect()), false, run(WARM_UP_RUN)).await?;
        let mut figures = Vec::with_capacity(runs);
        for r in 0..runs as u64 {
            figures.push(replay(client, &self.requests, self.sessions, run(r)).await?);
        }
        Ok(figures)
    }

    /// Summary of the replayed trace.
    pub fn into_summary(self) -> TraceSummary {
        self.summary
    }
}

impl fmt::Display for TraceSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, format, time, requests, skipped, too_long, seconds } = self;
        write!(
            f,
            "{file}: {format}, {requests} requests in {seconds:.1} s (from {time}); left out: {skipped} without "
        )?;
        write!(f, "prompt, output or end, {too_long} longer than the context")
    }
}

/// Sends all requests and waits for the responses.
async fn replay(client: &Arc<Client>, requests: &Arc<Vec<TraceRequest>>, sessions: bool, run: Run) -> Result<Figures> {
    let mut tasks = JoinSet::new();
    for chain in chains(requests, sessions) {
        let first = chain.first().map_or(Duration::ZERO, |&first| requests[first].at);
        tokio::time::sleep_until((run.start + scaled(first, run.speed)).into()).await;
        tasks.spawn(send(client.clone(), requests.clone(), chain, run));
    }
    figures(tasks.join_all().await.into_iter().flatten(), run.start.elapsed())
}

/// Positions of consecutive requests, in the order of their first arrivals: those of a session, or each request alone.
pub fn chains(requests: &[TraceRequest], sessions: bool) -> Vec<Vec<usize>> {
    let mut chains: Vec<Vec<usize>> = Vec::new();
    let mut of_session: HashMap<u64, usize> = HashMap::new();
    for (i, request) in requests.iter().enumerate() {
        let next = chains.len();
        let chain = match request.session.filter(|_| sessions) {
            Some(session) => *of_session.entry(session).or_insert(next),
            None => next,
        };
        match chains.get_mut(chain) {
            Some(chain) => chain.push(i),
            None => chains.push(vec![i]),
        }
    }
    chains
}

/// Sends the requests of a chain, each after the response to the previous one: after its delay, or at its time if the
/// trace has no delay.
async fn send(
    client: Arc<Client>,
    requests: Arc<Vec<TraceRequest>>,
    chain: Vec<usize>,
    run: Run,
) -> Vec<Result<Completion>> {
    let mut results = Vec::with_capacity(chain.len());
    for (i, &request) in chain.iter().enumerate() {
        let request = &requests[request];
        match request.delay {
            Some(delay) if i > 0 => tokio::time::sleep(scaled(delay, run.speed)).await,
            _ => tokio::time::sleep_until((run.start + scaled(request.at, run.speed)).into()).await,
        }
        let prompt = request.prompt(run.vocab, run.seed);
        results.push(client.complete_in(run.seed, &prompt, request.output_len).await);
    }
    results
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_a_session_follow_each_other() {
        let requests = [Some(7), None, Some(3), Some(7), None, Some(7)]
            .map(|session| TraceRequest { session, ..TraceRequest::default() });
        assert_eq!(chains(&requests, true), [vec![0, 3, 5], vec![1], vec![2], vec![4]]);
        assert_eq!(chains(&requests, false), (0..6).map(|i| vec![i]).collect::<Vec<_>>());
    }
}
