//! Latencies and token counts of the requests of each engine.

use super::buckets::{LATENCY, TOKEN_TIME, TTFT};
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::sync::Arc;

/// A histogram of each engine.
type HistogramFamily = Family<[(&'static str, String); 1], Histogram, Buckets>;

/// Makes histograms with these bucket boundaries.
#[derive(Clone)]
struct Buckets(Arc<[f64]>);

impl MetricConstructor<Histogram> for Buckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(self.0.iter().copied())
    }
}

/// Histograms of the requests of one engine.
pub(super) struct RequestMetrics {
    pub time_to_first_token: Histogram,
    pub inter_token: Histogram,
    pub time_per_output_token: Histogram,
    pub e2e: Histogram,
    pub queue: Histogram,
    pub prefill: Histogram,
    pub decode: Histogram,
    pub inference: Histogram,
    pub prompt_tokens: Histogram,
    pub generation_tokens: Histogram,
    pub max_tokens: Histogram,
}

impl RequestMetrics {
    /// Registers the histograms of `engines` engines; `counts` are the buckets of token counts. Every engine has its
    /// series from the start.
    pub fn register(registry: &mut Registry, engines: usize, counts: &[f64]) -> Vec<Self> {
        let families = Self::families(registry, counts);
        let of = |engine: usize| {
            let one = |family: &HistogramFamily| (*family.get_or_create(&[("engine", engine.to_string())])).clone();
            let [ttft, inter_token, per_token, e2e, queue, prefill, decode, inference, prompt, generation, max_tokens] =
                families.each_ref().map(one);
            Self {
                time_to_first_token: ttft,
                inter_token,
                time_per_output_token: per_token,
                e2e,
                queue,
                prefill,
                decode,
                inference,
                prompt_tokens: prompt,
                generation_tokens: generation,
                max_tokens,
            }
        };
        (0..engines).map(of).collect()
    }

    /// The registered histograms, in the order of the fields.
    fn families(registry: &mut Registry, counts: &[f64]) -> [HistogramFamily; 11] {
        let mut family = |name: &str, help: &str, buckets: &[f64]| {
            let family = HistogramFamily::new_with_constructor(Buckets(buckets.into()));
            registry.register(name, help, family.clone());
            family
        };
        [
            family("vllm:time_to_first_token_seconds", "Time from submit to the first token", TTFT),
            family("vllm:inter_token_latency_seconds", "Time between consecutive tokens (ITL)", TOKEN_TIME),
            family(
                "vllm:request_time_per_output_token_seconds",
                "Mean time per output token after the first (TPOT) of one request",
                TOKEN_TIME,
            ),
            family("vllm:e2e_request_latency_seconds", "Time from submit to the end", LATENCY),
            family("vllm:request_queue_time_seconds", "Time from submit to admission", LATENCY),
            family("vllm:request_prefill_time_seconds", "Time from admission to the first token", LATENCY),
            family("vllm:request_decode_time_seconds", "Time from the first token to the last", LATENCY),
            family("vllm:request_inference_time_seconds", "Time from admission to the last token", LATENCY),
            family("vllm:request_prompt_tokens", "Prompt tokens of one request", counts),
            family("vllm:request_generation_tokens", "Generated tokens of one request", counts),
            family("vllm:request_params_max_tokens", "max_tokens of one request", counts),
        ]
    }
}
