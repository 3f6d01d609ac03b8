//! Measurements of single requests, and their statistics.
//!
//! TTFT: from just before the request is sent to the first token. TPOT: the time from the first token to the last,
//! divided by the number of tokens after the first. ITL: the time between two tokens as they arrive; tokens that arrive
//! together are 0 apart.

use super::percentiles::{Gaps, Percentiles, milliseconds};
use serde::Serialize;
use std::time::{Duration, Instant};

/// A client's view of one completed request.
#[derive(Debug, Clone)]
pub struct Completion {
    /// Time just before it was sent.
    pub start: Instant,
    /// Arrival times of its tokens since `start`; at least one.
    pub stamps: Vec<Duration>,
    /// Number of prompt tokens.
    pub prompt: usize,
    /// Number of requested tokens.
    pub asked: usize,
    /// Number of generated tokens, counted by the server.
    pub tokens: usize,
    /// Number of prompt tokens found in the prefix cache; 0 if the server does not report it.
    pub cached: usize,
}

/// Measurements of one request on the client's side.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Same as [`Completion::start`].
    pub start: Instant,
    /// Time from `start` to the arrival of its first token.
    pub first: Duration,
    /// Time from `start` to the arrival of its last token.
    pub last: Duration,
    /// Same as [`Completion::prompt`].
    pub prompt: usize,
    /// Same as [`Completion::asked`].
    pub asked: usize,
    /// Same as [`Completion::tokens`].
    pub tokens: usize,
    /// Same as [`Completion::cached`].
    pub cached: usize,
}

impl Sample {
    /// Measurements of a completed request.
    pub fn new(completion: &Completion) -> Self {
        let Completion { start, prompt, asked, tokens, cached, .. } = *completion;
        let stamps = &completion.stamps;
        let (first, last) = (stamps.first().copied().unwrap_or_default(), stamps.last().copied().unwrap_or_default());
        Self { start, first, last, prompt, asked, tokens, cached }
    }

    /// TTFT in milliseconds.
    pub fn ttft(&self) -> f64 {
        milliseconds(self.first)
    }

    /// TPOT in milliseconds; `None` for a single token.
    pub fn tpot(&self) -> Option<f64> {
        (self.tokens > 1).then(|| milliseconds(self.last - self.first) / (self.tokens - 1) as f64)
    }
}

/// Measurements of the requests of a run.
#[derive(Debug, Clone, Default)]
pub struct Measurements {
    /// Measurements of each request.
    pub samples: Vec<Sample>,
    /// Inter-token latencies of all requests.
    pub gaps: Gaps,
}

impl Measurements {
    /// Adds a completed request.
    pub fn add(&mut self, completion: Completion) {
        completion.stamps.windows(2).for_each(|pair| self.gaps.add(pair[1] - pair[0]));
        self.samples.push(Sample::new(&completion));
    }
}

/// Metrics of one run, or their medians over several runs.
#[derive(Debug, Clone, Serialize)]
pub struct Figures {
    /// Number of successful requests.
    pub requests: usize,
    /// Number of refused or failed requests. They are not part of any other metric.
    pub failed: usize,
    /// Number of successful requests with fewer tokens than requested: the server does not know `ignore_eos`.
    pub stopped_early: usize,
    /// Time from the first request to the end of the last one, in seconds.
    pub wall_s: f64,
    /// Time to first token (TTFT).
    pub ttft_ms: Percentiles,
    /// Time per output token after the first (TPOT).
    pub tpot_ms: Percentiles,
    /// Inter-token latency (ITL).
    pub itl_ms: Percentiles,
    /// Requests per second.
    pub req_s: f64,
    /// Generated tokens per second, over all requests.
    pub output_tok_s: f64,
    /// Prompt and generated tokens per second.
    pub total_tok_s: f64,
    /// Mean number of requests between their first and their last token, over the time with at least one: the mean
    /// batch size of decode steps.
    pub decoding: f64,
    /// Prompt tokens, mean per request.
    pub prompt_tokens: f64,
    /// Generated tokens, mean per request.
    pub output_tokens: f64,
    /// Prompt tokens found in the prefix cache, mean per request.
    pub cached_tokens: f64,
}

impl Figures {
    /// Metrics of one run that took `wall`.
    pub fn new(measurements: &Measurements, failed: usize, wall: Duration) -> Self {
        let Measurements { samples, gaps } = measurements;
        let seconds = wall.as_secs_f64();
        let sum = |count: fn(&Sample) -> usize| samples.iter().map(count).sum::<usize>();
        let (prompt, output, cached) = (sum(|s| s.prompt), sum(|s| s.tokens), sum(|s| s.cached));
        let mean = |sum: usize| sum as f64 / samples.len() as f64;
        Self {
            requests: samples.len(),
            failed,
            stopped_early: samples.iter().filter(|s| s.tokens < s.asked).count(),
            wall_s: seconds,
            ttft_ms: Percentiles::new(samples.iter().map(Sample::ttft).collect()),
            tpot_ms: Percentiles::new(samples.iter().filter_map(Sample::tpot).collect()),
            itl_ms: gaps.percentiles(),
            req_s: samples.len() as f64 / seconds,
            output_tok_s: output as f64 / seconds,
            total_tok_s: (prompt + output) as f64 / seconds,
            decoding: decoding(samples),
            prompt_tokens: mean(prompt),
            output_tokens: mean(output),
            cached_tokens: mean(cached),
        }
    }

    /// The median of each metric; requests, failures and early stops are summed.
    pub fn median(runs: &[Self]) -> Self {
        let of = |figure: &dyn Fn(&Self) -> f64| Percentiles::new(runs.iter().map(figure).collect()).p50;
        let each = |time: &dyn Fn(&Self) -> Percentiles| Percentiles {
            p50: of(&|r| time(r).p50),
            p90: of(&|r| time(r).p90),
            p99: of(&|r| time(r).p99),
        };
        Self {
            requests: runs.iter().map(|r| r.requests).sum(),
            failed: runs.iter().map(|r| r.failed).sum(),
            stopped_early: runs.iter().map(|r| r.stopped_early).sum(),
            wall_s: of(&|r| r.wall_s),
            ttft_ms: each(&|r| r.ttft_ms),
            tpot_ms: each(&|r| r.tpot_ms),
            itl_ms: each(&|r| r.itl_ms),
            req_s: of(&|r| r.req_s),
            output_tok_s: of(&|r| r.output_tok_s),
            total_tok_s: of(&|r| r.total_tok_s),
            decoding: of(&|r| r.decoding),
            prompt_tokens: of(&|r| r.prompt_tokens),
            output_tokens: of(&|r| r.output_tokens),
            cached_tokens: of(&|r| r.cached_tokens),
        }
    }
}

/// See [`Figures::decoding`]; NaN if no request has two tokens.
fn decoding(samples: &[Sample]) -> f64 {
    let mut spans: Vec<(Instant, Instant)> = samples.iter().map(|s| (s.start + s.first, s.start + s.last)).collect();
    spans.sort_unstable();
    let (mut sum, mut busy, mut until) = (Duration::ZERO, Duration::ZERO, None);
    for (first, last) in spans {
        sum += last - first;
        let from = until.map_or(first, |until| first.max(until));
        busy += last.saturating_duration_since(from);
        until = until.max(Some(last));
    }
    sum.as_secs_f64() / busy.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(start: Instant, stamps: &[u64], tokens: usize, cached: usize) -> Completion {
        let stamps = stamps.iter().map(|&ms| Duration::from_millis(ms)).collect();
        Completion { start, stamps, prompt: 100, asked: 4, tokens, cached }
    }

    fn measured(completions: impl IntoIterator<Item = Completion>) -> Measurements {
        let mut measurements = Measurements::default();
        completions.into_iter().for_each(|completion| measurements.add(completion));
        measurements
    }

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-9 * b.abs().max(1.0), "{a} is not {b}");
    }

    #[test]
    fn figures_of_two_requests_computed_by_hand() {
        let now = Instant::now();
        // Four tokens in three arrivals: the last two arrived in one event.
        let later = now + Duration::from_millis(30);
        let all = measured([completion(now, &[10, 20, 70], 4, 16), completion(later, &[30, 40], 2, 0)]);
        let figures = Figures::new(&all, 1, Duration::from_millis(200));
        close(figures.ttft_ms.p50, 20.0);
        close(figures.ttft_ms.p90, 28.0);
        // (70 - 10) / 3 and (40 - 30) / 1.
        close(figures.tpot_ms.p50, 15.0);
        // 10, 50 and 10.
        close(figures.itl_ms.p50, 10.0);
        close(figures.itl_ms.p90, 42.0);
        close(figures.req_s, 10.0);
        close(figures.output_tok_s, 30.0);
        close(figures.total_tok_s, 1030.0);
        // One from 10 to 70, the other from 60 to 70.
        close(figures.decoding, 70.0 / 60.0);
        close(figures.cached_tokens, 8.0);
        close(figures.prompt_tokens, 100.0);
        close(figures.output_tokens, 3.0);
        assert_eq!((figures.requests, figures.failed, figures.stopped_early), (2, 1, 1));
    }

    #[test]
    fn decoding_counts_the_time_in_which_something_decodes() {
        let now = Instant::now();
        let of = |spans: &[(u64, u64)]| {
            decoding(&measured(spans.iter().map(|&(a, b)| completion(now, &[a, b], 2, 0))).samples)
        };
        close(of(&[(0, 10), (20, 30)]), 1.0);
        close(of(&[(20, 30), (0, 10), (0, 30), (5, 5)]), 50.0 / 30.0);
        assert!(of(&[(5, 5)]).is_nan() && of(&[]).is_nan());
    }

    #[test]
    fn a_single_token_has_no_tpot() {
        let figures = Figures::new(&measured([completion(Instant::now(), &[5], 1, 0)]), 0, Duration::from_millis(10));
        close(figures.ttft_ms.p50, 5.0);
        assert!(figures.tpot_ms.p50.is_nan() && figures.itl_ms.p99.is_nan());
        assert_eq!(serde_json::to_value(&figures).unwrap()["tpot_ms"]["p50"], serde_json::Value::Null);
    }

    #[test]
    fn the_median_is_taken_of_each_figure() {
        let run = |ttft, wall| {
            let completion = completion(Instant::now(), &[ttft, ttft + 4], 3, 0);
            Figures::new(&measured([completion]), 0, Duration::from_millis(wall))
        };
        let median = Figures::median(&[run(9, 100), run(1, 400), run(5, 200)]);
        close(median.ttft_ms.p50, 5.0);
        close(median.tpot_ms.p99, 2.0);
        close(median.wall_s, 0.2);
        assert_eq!((median.requests, median.stopped_early), (3, 3));
    }
}
