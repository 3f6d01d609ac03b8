//! Prometheus metrics under the names of vLLM, so that its dashboards and routers work.
//!
//! Gauges and token counters are read from the engine's statistics at each scrape; latencies are measured per request, from
//! submit, by the times at which the engine emitted its tokens. Only metrics that have data are registered.

mod engine;
mod request;

use engine::EngineCollector;
use pegainfer_core::engine::EngineHandle;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
pub use request::{Outcome, RequestRecord};
use std::fmt;

/// Bucket boundaries of histograms in seconds: vLLM's, and finer ones below 10 ms, where decode steps lie.
const TTFT: &[f64] = &[
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const TOKEN_TIME: &[f64] = &[
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const LATENCY: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
];

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
        let counts = token_buckets(engine.limits().max_model_len);
        registry.register_collector(Box::new(EngineCollector(engine)));
        let finished = Family::default();
        registry.register("vllm:request_success", "Requests that ended, by the reason", finished.clone());
        let rejections = Family::default();
        registry.register(
            "vllm:admission_rejections",
            "Requests refused because the queue is full or the server drains",
            rejections.clone(),
        );
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
            finished,
            rejections,
            registry,
        }
    }

    /// All metrics in the text format of Prometheus.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }

    /// Counts a refused request.
    pub fn rejected(&self, reason: &'static str) {
        self.rejections.get_or_create(&[("reason", reason)]).inc();
    }
}

/// Bucket boundaries of token counts: 1, 2, 5, 10, … up to the context length.
fn token_buckets(max_model_len: usize) -> Vec<f64> {
    let steps = (0..).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(power)));
    steps.take_while(|&bound| bound <= max_model_len as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_sorted() {
        for buckets in [TTFT, TOKEN_TIME, LATENCY] {
            assert!(buckets.is_sorted_by(|a, b| a < b));
        }
        assert_eq!(token_buckets(40), [1.0, 2.0, 5.0, 10.0, 20.0]);
    }
}
