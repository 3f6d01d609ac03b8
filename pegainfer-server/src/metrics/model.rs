//! Metrics of the requests of one model.

use super::buckets::{CHOICES, token_buckets};
use super::outcome::Outcome;
use super::per_engine::{BucketsFamily, ModelLabels, RequestFamilies, RequestMetrics};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::ops::Deref;
use std::sync::Arc;

/// Series of the requests of all models.
pub(super) struct ModelFamilies {
    finished: Family<[(&'static str, String); 3], Counter>,
    requests: RequestFamilies,
    choices: BucketsFamily,
    longest_choice: BucketsFamily,
    loads: Family<ModelLabels, Counter>,
}

impl ModelFamilies {
    pub fn register(registry: &mut Registry) -> Self {
        let requests = RequestFamilies::register(registry);
        let finished = Family::default();
        registry.register("vllm:request_success", "Requests that ended, by the reason", finished.clone());
        let loads = Family::default();
        registry.register("pegainfer:model_loads", "Times that the model was loaded", loads.clone());
        let mut family = |name: &str, help: &str, buckets: &[f64]| {
            let family = BucketsFamily::new(buckets);
            registry.register(name, help, family.series.clone());
            family
        };
        let choices = family("vllm:request_params_n", "n of one request: choices for each prompt", CHOICES);
        let longest = "Generated tokens of the longest choice of one request";
        let longest_choice = family("vllm:request_max_num_generation_tokens", longest, &[]);
        Self { finished, requests, choices, longest_choice, loads }
    }

    /// Counts a load of the model `name`, and returns its metrics with this number of engines. Every engine has its
    /// series from now on, and they stay when the model is unloaded.
    pub fn model(&self, name: &str, engines: usize, max_model_len: usize) -> ModelMetrics {
        let counts = token_buckets(max_model_len);
        let label =
            |engine: usize| -> ModelLabels { [("model_name", name.to_owned()), ("engine", engine.to_string())] };
        self.loads.get_or_create(&label(0)).inc();
        let requests = (0..engines).map(|engine| self.requests.engine(&label(engine), &counts)).collect();
        // Series of the whole model also have an engine, as those of vLLM's first engine do.
        let metrics = ModelMetrics {
            name: name.into(),
            finished: self.finished.clone(),
            requests,
            choices: self.choices.get(&label(0), None),
            longest_choice: self.longest_choice.get(&label(0), Some(&counts)),
        };
        for (engine, outcome) in (0..engines).flat_map(|engine| Outcome::ALL.map(|outcome| (engine, outcome))) {
            drop(metrics.of_outcome(engine, outcome));
        }
        metrics
    }
}

/// Metrics of the requests of one model.
pub struct ModelMetrics {
    /// Value of the label `model_name`.
    pub name: Arc<str>,
    finished: Family<[(&'static str, String); 3], Counter>,
    /// Metrics of the requests of each engine.
    requests: Vec<RequestMetrics>,
    choices: Histogram,
    longest_choice: Histogram,
}

impl ModelMetrics {
    /// Metrics of the requests of one engine.
    pub(super) fn requests(&self, engine: usize) -> &RequestMetrics {
        &self.requests[engine]
    }

    /// Counts a request of an engine that ended.
    pub(super) fn finished(&self, engine: usize, outcome: Outcome) {
        self.of_outcome(engine, outcome).inc();
    }

    /// The counter of requests of an engine that ended in this way.
    fn of_outcome(&self, engine: usize, outcome: Outcome) -> impl Deref<Target = Counter> {
        let labels = [
            ("model_name", self.name.to_string()),
            ("engine", engine.to_string()),
            ("finished_reason", outcome.name().to_owned()),
        ];
        self.finished.get_or_create(&labels)
    }

    /// Counts a request for `n` choices of each prompt.
    pub fn requested(&self, n: usize) {
        self.choices.observe(n as f64);
    }

    /// Records the tokens of the longest choice of a request.
    pub(super) fn longest_choice(&self, tokens: usize) {
        self.longest_choice.observe(tokens as f64);
    }
}
