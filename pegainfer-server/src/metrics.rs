//! Prometheus metrics under the names of vLLM, so that its dashboards and routers work.
//!
//! Gauges and token counters come from the engine's own statistics at the time of the scrape; latencies are measured
//! per request, from submit, by the times at which the engine emitted its tokens. Nothing is listed that nobody feeds.

use crate::trace::{ChoiceTrace, Stages};
use pegainfer_core::engine::EngineHandle;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// vLLM's boundaries, and finer ones below 10 ms, where a modern decode step lies.
const TTFT_BUCKETS: &[f64] = &[
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const TOKEN_TIME_BUCKETS: &[f64] = &[
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const LATENCY_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
];

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// End of text, stop token or stop string.
    Stop,
    /// `max_tokens` or the context.
    Length,
    /// The client went away, or time ran out.
    Abort,
    /// The engine failed.
    Error,
}

impl Ending {
    fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}

/// All metrics of one served model.
pub struct Metrics {
    registry: Registry,
    finished: Family<[(&'static str, &'static str); 1], Counter>,
    time_to_first_token: Histogram,
    inter_token: Histogram,
    time_per_output_token: Histogram,
    e2e: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    inference: Histogram,
    prompt_tokens: Histogram,
    generation_tokens: Histogram,
    max_tokens: Histogram,
    rejections: Family<[(&'static str, &'static str); 1], Counter>,
}

impl Metrics {
    /// Metrics of `engine`, labelled with the model's name.
    pub fn new(engine: EngineHandle, model_name: &str) -> Self {
        let labels = [("model_name".into(), model_name.to_string().into()), ("engine".into(), "0".into())];
        let mut registry = Registry::with_labels(labels.into_iter());
        let token_counts = token_buckets(engine.limits().max_model_len);
        registry.register_collector(Box::new(EngineCollector(engine)));
        let finished = Family::default();
        registry.register("vllm:request_success", "Requests that ended, by the reason", finished.clone());
        let rejections = Family::default();
        registry.register("vllm:admission_rejections", "Requests refused for lack of room", rejections.clone());
        let mut histogram = |name: &str, help: &str, buckets: &[f64]| {
            let histogram = Histogram::new(buckets.iter().copied());
            registry.register(name, help, histogram.clone());
            histogram
        };
        Self {
            time_to_first_token: histogram(
                "vllm:time_to_first_token_seconds",
                "Time from submit to the first token",
                TTFT_BUCKETS,
            ),
            inter_token: histogram(
                "vllm:inter_token_latency_seconds",
                "Time from one token to the next",
                TOKEN_TIME_BUCKETS,
            ),
            time_per_output_token: histogram(
                "vllm:request_time_per_output_token_seconds",
                "Mean time per token after the first, of one request",
                TOKEN_TIME_BUCKETS,
            ),
            e2e: histogram("vllm:e2e_request_latency_seconds", "Time from submit to the end", LATENCY_BUCKETS),
            queue: histogram("vllm:request_queue_time_seconds", "Time from submit to admission", LATENCY_BUCKETS),
            prefill: histogram(
                "vllm:request_prefill_time_seconds",
                "Time from admission to the first token",
                LATENCY_BUCKETS,
            ),
            decode: histogram(
                "vllm:request_decode_time_seconds",
                "Time from the first token to the last",
                LATENCY_BUCKETS,
            ),
            inference: histogram(
                "vllm:request_inference_time_seconds",
                "Time from admission to the last token",
                LATENCY_BUCKETS,
            ),
            prompt_tokens: histogram("vllm:request_prompt_tokens", "Prompt tokens of one request", &token_counts),
            generation_tokens: histogram(
                "vllm:request_generation_tokens",
                "Generated tokens of one request",
                &token_counts,
            ),
            max_tokens: histogram("vllm:request_params_max_tokens", "max_tokens of one request", &token_counts),
            finished,
            rejections,
            registry,
        }
    }

    /// All metrics as text.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }

    /// Counts a refusal.
    pub fn rejected(&self, reason: &'static str) {
        self.rejections.get_or_create(&[("reason", reason)]).inc();
    }

    /// Begins to follow a request that was just submitted.
    pub fn request(
        self: &Arc<Self>,
        id: &str,
        endpoint: &'static str,
        prompt_tokens: usize,
        max_tokens: usize,
        submitted: Instant,
    ) -> RequestRecord {
        RequestRecord {
            metrics: self.clone(),
            id: id.to_string(),
            endpoint,
            prompt_tokens,
            cached_tokens: 0,
            tokens: 0,
            max_tokens,
            submitted,
            admitted: None,
            first_token: None,
            last_token: submitted,
            detokenizing: Duration::ZERO,
            ended: false,
            trace: None,
        }
    }
}

/// 1, 2, 5, 10, … up to the context length.
fn token_buckets(max_model_len: usize) -> Vec<f64> {
    let steps = (0..).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(power)));
    steps.take_while(|&bound| bound <= max_model_len as f64).collect()
}

/// Follows one request. Dropped before its end, it counts as aborted.
pub struct RequestRecord {
    metrics: Arc<Metrics>,
    id: String,
    endpoint: &'static str,
    prompt_tokens: usize,
    cached_tokens: usize,
    tokens: usize,
    max_tokens: usize,
    submitted: Instant,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Instant,
    detokenizing: Duration,
    ended: bool,
    trace: Option<ChoiceTrace>,
}

impl RequestRecord {
    /// Also keeps its stages.
    pub fn trace(&mut self, trace: Option<ChoiceTrace>) {
        self.trace = trace;
    }

    /// Whether its stages are kept.
    pub fn is_traced(&self) -> bool {
        self.trace.is_some()
    }

    /// It took this long to make text of a token.
    pub fn detokenized(&mut self, time: Duration) {
        self.detokenizing += time;
    }

    /// The request left the queue at this time.
    pub fn admitted(&mut self, cached_tokens: usize, at: Instant) {
        self.cached_tokens = cached_tokens;
        self.admitted = Some(at);
        self.metrics.queue.observe((at - self.submitted).as_secs_f64());
    }

    /// The engine emitted a token at this time.
    pub fn token(&mut self, at: Instant) {
        if self.first_token.is_none() {
            self.first_token = Some(at);
            self.metrics.time_to_first_token.observe((at - self.submitted).as_secs_f64());
        } else {
            self.metrics.inter_token.observe((at - self.last_token).as_secs_f64());
        }
        self.tokens += 1;
        self.last_token = at;
        if let Some(trace) = &mut self.trace {
            trace.token(at);
        }
    }

    /// The request ended. Only the first call counts.
    pub fn end(&mut self, ending: Ending) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let total = self.submitted.elapsed();
        let per_token = self.time_per_token();
        self.metrics.finished.get_or_create(&[("finished_reason", ending.name())]).inc();
        if matches!(ending, Ending::Stop | Ending::Length) {
            self.complete(per_token);
        }
        self.log(ending, total, per_token);
        if let Some(trace) = self.trace.take() {
            trace.end(self.stages(), ending.name());
        }
    }

    /// When it reached which stage, so far.
    pub fn stages(&self) -> Stages {
        Stages {
            submitted: self.submitted,
            admitted: self.admitted,
            first_token: self.first_token,
            last_token: self.last_token,
            cached_tokens: self.cached_tokens,
            detokenizing: self.detokenizing,
        }
    }

    fn complete(&self, per_token: Option<Duration>) {
        let metrics = &self.metrics;
        let until_last = |from: Instant| (self.last_token - from).as_secs_f64();
        metrics.e2e.observe(until_last(self.submitted));
        metrics.prompt_tokens.observe(self.prompt_tokens as f64);
        metrics.generation_tokens.observe(self.tokens as f64);
        metrics.max_tokens.observe(self.max_tokens as f64);
        if let (Some(admitted), Some(first)) = (self.admitted, self.first_token) {
            metrics.prefill.observe((first - admitted).as_secs_f64());
            metrics.decode.observe(until_last(first));
            metrics.inference.observe(until_last(admitted));
        }
        if let Some(time) = per_token {
            metrics.time_per_output_token.observe(time.as_secs_f64());
        }
    }

    fn time_per_token(&self) -> Option<Duration> {
        let first = self.first_token?;
        let steps = u32::try_from(self.tokens.checked_sub(1)?).ok().filter(|&n| n > 0)?;
        Some((self.last_token - first) / steps)
    }

    fn log(&self, ending: Ending, total: Duration, per_token: Option<Duration>) {
        let since = |at: Option<Instant>| milliseconds(at.map(|at| at - self.submitted));
        log::info!(
            "{} {}: {} prompt tokens ({} cached), {} generated, {}; queued {}, first token {}, per token {}, total {}",
            self.endpoint,
            self.id,
            self.prompt_tokens,
            self.cached_tokens,
            self.tokens,
            ending.name(),
            since(self.admitted),
            since(self.first_token),
            milliseconds(per_token),
            milliseconds(Some(total)),
        );
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        self.end(Ending::Abort);
    }
}

fn milliseconds(time: Option<Duration>) -> String {
    time.map_or("-".into(), |time| format!("{:.1} ms", time.as_secs_f64() * 1e3))
}

/// Reads the engine's statistics at each scrape.
struct EngineCollector(EngineHandle);

impl fmt::Debug for EngineCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EngineCollector")
    }
}

impl Collector for EngineCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let (stats, limits) = (self.0.stats(), self.0.limits());
        let used = stats.kv_blocks_total.saturating_sub(stats.kv_blocks_free);
        let usage = used as f64 / stats.kv_blocks_total.max(1) as f64;
        for (name, help, value) in [
            ("vllm:num_requests_running", "Requests that hold KV blocks", stats.running as f64),
            ("vllm:num_requests_waiting", "Requests accepted and not yet running", stats.waiting as f64),
            ("vllm:kv_cache_usage_perc", "Share of the KV blocks that requests hold, 0 to 1", usage),
        ] {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        for (name, help, value) in [
            ("vllm:prompt_tokens", "Prompt tokens of admitted requests", stats.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated", stats.generation_tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hits),
            ("vllm:prompt_tokens_cached", "Prompt tokens that were not computed again", stats.prefix_hits),
            ("vllm:num_preemptions", "Requests that lost their KV blocks and were queued again", stats.preemptions),
        ] {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        let labels = [("block_size", limits.block_size.to_string()), ("num_gpu_blocks", limits.kv_blocks.to_string())];
        let info = ConstGauge::new(1i64);
        let mut family =
            encoder.encode_descriptor("vllm:cache_config_info", "Size of the KV cache", None, info.metric_type())?;
        info.encode(family.encode_family(&labels)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_sorted() {
        for buckets in [TTFT_BUCKETS, TOKEN_TIME_BUCKETS, LATENCY_BUCKETS] {
            assert!(buckets.is_sorted_by(|a, b| a < b));
        }
        assert_eq!(token_buckets(40), [1.0, 2.0, 5.0, 10.0, 20.0]);
    }
}
