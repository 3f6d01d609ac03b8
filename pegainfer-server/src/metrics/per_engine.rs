//! Latencies and token counts of the requests of each engine.

use super::buckets::{LATENCY, TOKEN_TIME, TTFT};
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::sync::{Arc, Mutex, PoisonError};

/// Labels of an engine of a model.
pub(super) type ModelLabels = [(&'static str, String); 2];

/// Bucket boundaries of the next histogram. Token counts end at the context length, which differs between models.
#[derive(Clone)]
pub(super) struct Buckets(Arc<Mutex<Arc<[f64]>>>);

impl MetricConstructor<Histogram> for Buckets {
    fn new_metric(&self) -> Histogram {
        let buckets = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Histogram::new(buckets.iter().copied())
    }
}

/// A histogram of each engine.
pub(super) struct BucketsFamily {
    /// The histograms.
    pub series: Family<ModelLabels, Histogram, Buckets>,
    buckets: Buckets,
    /// Held while a histogram is made.
    making: Mutex<()>,
}

impl BucketsFamily {
    pub fn new(buckets: &[f64]) -> Self {
        let buckets = Buckets(Arc::new(Mutex::new(buckets.into())));
        Self { series: Family::new_with_constructor(buckets.clone()), buckets, making: Mutex::default() }
    }

    /// The histogram with these labels; a new one has `buckets`, if they are given.
    pub fn get(&self, labels: &ModelLabels, buckets: Option<&[f64]>) -> Histogram {
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(buckets) = buckets {
            *self.buckets.0.lock().unwrap_or_else(PoisonError::into_inner) = buckets.into();
        }
        (*self.series.get_or_create(labels)).clone()
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

/// The histograms of all engines: times, and token counts, in the order of the fields of [`RequestMetrics`].
pub(super) struct RequestFamilies {
    times: [BucketsFamily; 8],
    counts: [BucketsFamily; 3],
}

impl RequestFamilies {
    pub fn register(registry: &mut Registry) -> Self {
        let mut family = |name: &str, help: &str, buckets: &[f64]| {
            let family = BucketsFamily::new(buckets);
            registry.register(name, help, family.series.clone());
            family
        };
        let times = [
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
        ];
        let [_, inter_token, ..] = &times;
        let help = "Older name of vllm:inter_token_latency_seconds, which AIBrix reads";
        registry.register("vllm:time_per_output_token_seconds", help, inter_token.series.clone());
        let mut family = |name: &str, help: &str| {
            let family = BucketsFamily::new(&[]);
            registry.register(name, help, family.series.clone());
            family
        };
        let counts = [
            family("vllm:request_prompt_tokens", "Prompt tokens of one request"),
            family("vllm:request_generation_tokens", "Generated tokens of one request"),
            family("vllm:request_params_max_tokens", "max_tokens of one request"),
        ];
        Self { times, counts }
    }

    /// The histograms of one engine; `counts` are the buckets of token counts.
    pub fn engine(&self, labels: &ModelLabels, counts: &[f64]) -> RequestMetrics {
        let [ttft, inter_token, per_token, e2e, queue, prefill, decode, inference] =
            self.times.each_ref().map(|family| family.get(labels, None));
        let [prompt, generation, max_tokens] = self.counts.each_ref().map(|family| family.get(labels, Some(counts)));
        RequestMetrics {
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
    }
}
