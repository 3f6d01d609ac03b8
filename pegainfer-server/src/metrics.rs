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
mod kv_events;
mod lora;
mod model;
mod outcome;
mod per_engine;
mod process;
mod recording;
mod request;
mod served;
mod tiers;

use crate::adapters::Adapters;
use crate::kv_events::Counters;
use crate::record::Recorder;
use crate::rejection::Rejection;
pub use choices::Choices;
use engine::EngineCollector;
pub use exposition::Exposition;
use http::HttpMetrics;
use kv_events::KvEventsCollector;
use lora::LoraCollector;
use model::ModelFamilies;
pub use model::ModelMetrics;
pub use outcome::Outcome;
use pegainfer_core::engine::EngineHandle;
use process::ProcessCollector;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use recording::RecordingCollector;
pub use request::RequestRecord;
use served::{ServedModel, ServedModels};
use std::fmt;
use std::sync::Arc;

/// All metrics of a server.
pub struct Metrics {
    registry: Registry,
    http: HttpMetrics,
    models: ModelFamilies,
    served: ServedModels,
    rejections: Family<[(&'static str, &'static str); 1], Counter>,
    unread_output: Gauge,
}

impl Metrics {
    /// Metrics of a server without models, and of its recording. Series of the whole server have the name of its first
    /// model.
    pub fn new(model_name: &str, recorder: Option<Arc<Recorder>>) -> Self {
        let mut registry = Registry::default();
        let models = ModelFamilies::register(&mut registry);
        let served = ServedModels::default();
        registry.register_collector(Box::new(EngineCollector(served.clone())));
        registry.register_collector(Box::new(LoraCollector(served.clone())));
        registry.register_collector(Box::new(KvEventsCollector(served.clone())));
        // Series of the whole server also have an engine, as those of vLLM's first engine do.
        let labels = [("model_name".into(), model_name.to_owned().into()), ("engine".into(), "0".into())];
        let server = registry.sub_registry_with_labels(labels.into_iter());
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
        Self { registry, http, models, served, rejections, unread_output }
    }

    /// Adds a loaded model; `kv_events` are the counters of each engine's events, if they are published. Call
    /// [`unloaded`](Self::unloaded) before its engine stops.
    pub fn loaded(
        &self,
        name: &str,
        engine: EngineHandle,
        adapters: Option<Arc<Adapters>>,
        kv_events: Vec<Arc<Counters>>,
    ) -> Arc<ModelMetrics> {
        let metrics = self.models.model(name, engine.engines().len(), engine.limits().max_model_len);
        self.served.add(ServedModel { name: metrics.name.clone(), engine, adapters, kv_events });
        Arc::new(metrics)
    }

    /// Takes a model's engine away; the counts of its requests stay. Dropping the last handle of an engine may block.
    pub fn unloaded(&self, name: &str) {
        drop(self.served.remove(name));
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

    /// Sets the number of bytes that clients have not read.
    pub fn unread_output(&self, bytes: u64) {
        self.unread_output.set(bytes as i64);
    }

    /// Counts a refused request.
    pub fn rejected(&self, reason: Rejection) {
        self.rejections.get_or_create(&[("reason", reason.name())]).inc();
    }
}
