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
mod per_engine;
mod process;
mod recording;
mod request;

use crate::record::Recorder;
use crate::rejection::Rejection;
use buckets::{CHOICES, token_buckets};
pub use choices::{Choices, Outcome};
use engine::EngineCollector;
pub use exposition::Exposition;
use http::HttpMetrics;
use pegainfer_core::engine::EngineHandle;
use per_engine::RequestMetrics;
use process::ProcessCollector;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use recording::RecordingCollector;
pub use request::RequestRecord;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// All metrics of one served model.
pub struct Metrics {
    registry: Registry,
    http: HttpMetrics,
    finished: Family<[(&'static str, String); 2], Counter>,
    /// Metrics of the requests of each engine.
    requests: Vec<RequestMetrics>,
    choices: Histogram,
    longest_choice: Histogram,
    rejections: Family<[(&'static str, &'static str); 1], Counter>,
    unread_output: Gauge,
}

impl Metrics {
    /// Metrics of the engines, labelled with the model's name, and of the recording.
    pub fn new(engine: EngineHandle, model_name: &str, recorder: Option<Arc<Recorder>>) -> Self {
        let mut registry = Registry::with_labels([("model_name".into(), model_name.to_string().into())].into_iter());
        let counts = token_buckets(engine.limits().max_model_len);
        let requests = RequestMetrics::register(&mut registry, engine.engines().len(), &counts);
        let finished = Family::default();
        registry.register("vllm:request_success", "Requests that ended, by the reason", finished.clone());
        registry.register_collector(Box::new(EngineCollector(engine)));
        // Series of the whole server also have an engine, as those of vLLM's first engine do.
        let server = registry.sub_registry_with_label(("engine".into(), "0".into()));
        server.register_collector(Box::new(ProcessCollector));
        server.register_collector(Box::new(RecordingCollector(recorder)));
        let http = HttpMetrics::new(server);
        // A series that begins with its first event hides that event from `increase()`.
        let rejections = Family::<[(&'static str, &'static str); 1], Counter>::default();
        for reason in Rejection::ALL {
            drop(rejections.get_or_create(&[("reason", reason.name())]));
        }
        server.register(
            "vllm:admission_rejections",
            "Requests refused by a limit, or because the server drains",
            rejections.clone(),
        );
        let unread_output = Gauge::default();
        let help = "Output that waits for clients which have not read it";
        server.register("pegainfer:unread_output_bytes", help, unread_output.clone());
        let mut histogram = |name: &str, help: &str, buckets: &[f64]| {
            let histogram = Histogram::new(buckets.iter().copied());
            server.register(name, help, histogram.clone());
            histogram
        };
        let metrics = Self {
            requests,
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
        };
        for (engine, outcome) in
            (0..metrics.requests.len()).flat_map(|engine| Outcome::ALL.map(|outcome| (engine, outcome)))
        {
            drop(metrics.of_outcome(engine, outcome));
        }
        metrics
    }

    /// Metrics of the requests of one engine.
    fn requests(&self, engine: usize) -> &RequestMetrics {
        &self.requests[engine]
    }

    /// Counts a request of an engine that ended.
    fn finished(&self, engine: usize, outcome: Outcome) {
        self.of_outcome(engine, outcome).inc();
    }

    /// The counter of requests of an engine that ended in this way.
    fn of_outcome(&self, engine: usize, outcome: Outcome) -> impl Deref<Target = Counter> {
        let labels = [("engine", engine.to_string()), ("finished_reason", outcome.name().to_owned())];
        self.finished.get_or_create(&labels)
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
    pub fn rejected(&self, reason: Rejection) {
        self.rejections.get_or_create(&[("reason", reason.name())]).inc();
    }
}
