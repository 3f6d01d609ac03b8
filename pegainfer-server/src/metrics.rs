//! Prometheus metrics with vLLM's names, so that its dashboards and routers work.
//!
//! Gauges and token counters are read from the engine's statistics at each scrape. Latencies are measured per request,
//! from its submit to the engine's token timestamps. Only metrics with data are registered.

pub mod access;
mod buckets;
mod choices;
mod engine;
mod exposition;
mod http;
mod process;
mod recording;
mod request;

use crate::record::Recorder;
use buckets::{CHOICES, LATENCY, TOKEN_TIME, TTFT, token_buckets};
pub use choices::{Choices, Outcome};
use engine::EngineCollector;
pub use exposition::Exposition;
use http::HttpMetrics;
use pegainfer_core::engine::EngineHandle;
use process::ProcessCollector;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use recording::RecordingCollector;
pub use request::RequestRecord;
use std::fmt;
use std::sync::Arc;

/// All metrics of one served model.
pub struct Metrics {
    registry: Registry,
    http: HttpMetrics,
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
    choices: Histogram,
    longest_choice: Histogram,
    rejections: Family<[(&'static str, &'static str); 1], Counter>,
    unread_output: Gauge,
}

impl Metrics {
    /// Metrics of `engine`, labelled with the model's name, and of the recording.
    pub fn new(engine: EngineHandle, model_name: &str, recorder: Option<Arc<Recorder>>) -> Self {
        let labels = [("model_name".into(), model_name.to_string().into()), ("engine".into(), "0".into())];
        let mut registry = Registry::with_labels(labels.into_iter());
        let counts = token_buckets(engine.limits().max_model_len);
        registry.register_collector(Box::new(EngineCollector(engine)));
        registry.register_collector(Box::new(ProcessCollector));
        registry.register_collector(Box::new(RecordingCollector(recorder)));
        let http = HttpMetrics::new(&mut registry);
        let finished = Family::default();
        registry.register("vllm:request_success", "Requests that ended, by the reason", finished.clone());
        let rejections = Family::default();
        registry.register(
            "vllm:admission_rejections",
            "Requests refused by a limit, or because the server drains",
            rejections.clone(),
        );
        let unread_output = Gauge::default();
        let help = "Output that waits for clients which have not read it";
        registry.register("pegainfer:unread_output_bytes", help, unread_output.clone());
        let mut histogram = |name: &str, help: &str, buckets: &[f64]| {
            let histogram = Histogram::new(buckets.iter().copied());
            registry.register(name, help, histogram.clone());
            histogram
        };
        Self {
            time_to_first_token: histogram(
                "vllm:time_to_first_token_seconds",
                "Time from submit to the first token",
                TTFT,
            ),
            inter_token: histogram(
                "vllm:inter_token_latency_seconds",
                "Time between consecutive tokens (ITL)",
                TOKEN_TIME,
            ),
            time_per_output_token: histogram(
                "vllm:request_time_per_output_token_seconds",
                "Mean time per output token after the first (TPOT) of one request",
                TOKEN_TIME,
            ),
            e2e: histogram("vllm:e2e_request_latency_seconds", "Time from submit to the end", LATENCY),
            queue: histogram("vllm:request_queue_time_seconds", "Time from submit to admission", LATENCY),
            prefill: histogram("vllm:request_prefill_time_seconds", "Time from admission to the first token", LATENCY),
            decode: histogram("vllm:request_decode_time_seconds", "Time from the first token to the last", LATENCY),
            inference: histogram(
                "vllm:request_inference_time_seconds",
                "Time from admission to the last token",
                LATENCY,
            ),
            prompt_tokens: histogram("vllm:request_prompt_tokens", "Prompt tokens of one request", &counts),
            generation_tokens: histogram("vllm:request_generation_tokens", "Generated tokens of one request", &counts),
            max_tokens: histogram("vllm:request_params_max_tokens", "max_tokens of one request", &counts),
            choices: histogram("vllm:request_params_n", "n of one request: choices for each prompt", CHOICES),
            longest_choice: histogram(
                "vllm:request_max_num_generation_tokens",
                "Generated tokens of the longest choice of one request",
                &counts,
            ),
            http,
            finished,
            rejections,
            unread_output,
            registry,
        }
    }

    /// All metrics as text.
    pub fn encode(&self, exposition: Exposition) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(match exposition {
            Exposition::OpenMetrics => text,
            Exposition::Prometheus => exposition::to_prometheus(&text),
        })
    }

    /// Counts a request for `n` choices of each prompt.
    pub fn requested(&self, n: usize) {
        self.choices.observe(n as f64);
    }

    /// Sets the number of bytes that clients have not read.
    pub fn unread_output(&self, bytes: u64) {
        self.unread_output.set(bytes as i64);
    }

    /// Counts a refused request.
    pub fn rejected(&self, reason: &'static str) {
        self.rejections.get_or_create(&[("reason", reason)]).inc();
    }
}
