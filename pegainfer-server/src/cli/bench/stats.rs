//! Measurements of single requests, and their statistics.
//!
//! TTFT: from just before the request is sent to the first token. TPOT: the time from the first token to the last, over
//! the tokens after the first. ITL: the time between two tokens as they arrive; tokens that arrive together are 0 apart.

use serde::Serialize;
use std::time::{Duration, Instant};

/// Measurements of one request, as the client saw it.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Time just before it was sent.
    pub start: Instant,
    /// Time from then to the arrival of each of its tokens, at least one.
    pub stamps: Vec<Duration>,
    /// Tokens of its prompt.
    pub prompt: usize,
    /// Tokens that it asked for.
    pub asked: usize,
    /// Number of generated tokens, as the server counts them.
    pub tokens: usize,
    /// Number of prompt tokens found in the prefix cache; 0 if the server does not report it.
    pub cached: usize,
}

impl Sample {
    fn first(&self) -> Duration {
        self.stamps.first().copied().unwrap_or_default()
    }

    fn last(&self) -> Duration {
        self.stamps.last().copied().unwrap_or_default()
    }

    fn ttft(&self) -> f64 {
        milliseconds(self.first())
    }

    /// `None` for a single token.
    fn tpot(&self) -> Option<f64> {
        (self.tokens > 1).then(|| milliseconds(self.last() - self.first()) / (self.tokens - 1) as f64)
    }

    fn itl(&self) -> impl Iterator<Item = f64> {
        self.stamps.windows(2).map(|pair| milliseconds(pair[1] - pair[0]))
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Percentiles by linear interpolation between the closest ranks, of a time in milliseconds; NaN (null in JSON) if nothing was measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Percentiles {
    /// The median.
    pub p50: f64,
    /// The 90th percentile.
    pub p90: f64,
    /// The 99th percentile.
    pub p99: f64,
}

impl Percentiles {
    fn of(mut values: Vec<f64>) -> Self {
        // A long run has millions of values: each percentile is selected among those that are not below the one before.
        let mut below = 0;
        let mut at = |percent: f64| {
            let rank = percent / 100.0 * values.len().saturating_sub(1) as f64;
            let low = rank.floor() as usize;
            let rest = &mut values[below..];
            if rest.is_empty() {
                return f64::NAN;
            }
            let (_, &mut a, above) = rest.select_nth_unstable_by(low - below, f64::total_cmp);
            let b = above.iter().copied().min_by(f64::total_cmp).unwrap_or(a);
            below = low;
            a + (b - a) * rank.fract()
        };
        Self { p50: at(50.0), p90: at(90.0), p99: at(99.0) }
    }
}

/// Metrics of one run, or their medians over several runs.
#[derive(Debug, Clone, Serialize)]
pub struct Figures {
    /// Number of successful requests.
    pub requests: usize,
    /// Number of requests that were refused or failed; they are not part of any other metric.
    pub failed: usize,
    /// Number of successful requests with fewer tokens than they asked for: the server does not know `ignore_eos`.
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
    /// Mean number of requests between their first and their last token, over the time in which there is at least one: the
    /// mean batch size of decode steps.
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
    pub fn of(samples: &[Sample], failed: usize, wall: Duration) -> Self {
        let seconds = wall.as_secs_f64();
        let sum = |count: fn(&Sample) -> usize| samples.iter().map(count).sum::<usize>();
        let (prompt, output, cached) = (sum(|s| s.prompt), sum(|s| s.tokens), sum(|s| s.cached));
        let mean = |sum: usize| sum as f64 / samples.len() as f64;
        let mut itl = Vec::with_capacity(samples.iter().map(|s| s.stamps.len()).sum());
        samples.iter().for_each(|s| itl.extend(s.itl()));
        Self {
            requests: samples.len(),
            failed,
            stopped_early: samples.iter().filter(|s| s.tokens < s.asked).count(),
            wall_s: seconds,
            ttft_ms: Percentiles::of(samples.iter().map(Sample::ttft).collect()),
            tpot_ms: Percentiles::of(samples.iter().filter_map(Sample::tpot).collect()),
            itl_ms: Percentiles::of(itl),
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
        let of = |figure: &dyn Fn(&Self) -> f64| Percentiles::of(runs.iter().map(figure).collect()).p50;
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
    let mut spans: Vec<(Instant, Instant)> =
        samples.iter().map(|s| (s.start + s.first(), s.start + s.last())).collect();
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

    fn sample(start: Instant, stamps: &[u64], tokens: usize, cached: usize) -> Sample {
        let stamps = stamps.iter().map(|&ms| Duration::from_millis(ms)).collect();
        Sample { start, stamps, prompt: 100, asked: 4, tokens, cached }
    }

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-9 * b.abs().max(1.0), "{a} is not {b}");
    }

    #[test]
    fn percentiles_interpolate() {
        let values = Percentiles::of(vec![4.0, 1.0, 3.0, 2.0]);
        close(values.p50, 2.5);
        close(values.p90, 3.7);
        close(values.p99, 3.97);
        assert!(Percentiles::of(vec![]).p50.is_nan());
        close(Percentiles::of(vec![7.0]).p99, 7.0);
    }

    #[test]
    fn figures_of_two_requests_computed_by_hand() {
        let now = Instant::now();
        // Four tokens in three arrivals: the last two arrived in one event.
        let samples = [sample(now, &[10, 20, 70], 4, 16), sample(now + Duration::from_millis(30), &[30, 40], 2, 0)];
        let figures = Figures::of(&samples, 1, Duration::from_millis(200));
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
            decoding(&spans.iter().map(|&(a, b)| sample(now, &[a, b], 2, 0)).collect::<Vec<_>>())
        };
        close(of(&[(0, 10), (20, 30)]), 1.0);
        close(of(&[(20, 30), (0, 10), (0, 30), (5, 5)]), 50.0 / 30.0);
        assert!(of(&[(5, 5)]).is_nan() && of(&[]).is_nan());
    }

    #[test]
    fn a_single_token_has_no_tpot() {
        let figures = Figures::of(&[sample(Instant::now(), &[5], 1, 0)], 0, Duration::from_millis(10));
        close(figures.ttft_ms.p50, 5.0);
        assert!(figures.tpot_ms.p50.is_nan() && figures.itl_ms.p99.is_nan());
        assert_eq!(serde_json::to_value(&figures).unwrap()["tpot_ms"]["p50"], serde_json::Value::Null);
    }

    #[test]
    fn the_median_is_taken_of_each_figure() {
        let run = |ttft, wall| {
            Figures::of(&[sample(Instant::now(), &[ttft, ttft + 4], 3, 0)], 0, Duration::from_millis(wall))
        };
        let median = Figures::median(&[run(9, 100), run(1, 400), run(5, 200)]);
        close(median.ttft_ms.p50, 5.0);
        close(median.tpot_ms.p99, 2.0);
        close(median.wall_s, 0.2);
        assert_eq!((median.requests, median.stopped_early), (3, 3));
    }
}
