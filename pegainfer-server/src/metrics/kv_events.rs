//! Counters of KV events (`--kv-events-config`).

use super::served::{ServedModel, ServedModels};
use crate::kv_events::{Counters, Restart};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use std::fmt;

/// Reads the counters of KV events at each scrape.
pub(super) struct KvEventsCollector(pub(super) ServedModels);

impl fmt::Debug for KvEventsCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KvEventsCollector")
    }
}

/// Values of an engine's counters, with the reasons of those that have one.
type Values = fn(&Counters) -> Vec<(Option<&'static str>, u64)>;

const COUNTERS: [(&str, &str, Values); 3] = [
    ("pegainfer:kv_event_batches", "Published batches of KV events", |counters| vec![(None, counters.batches())]),
    (
        "pegainfer:kv_event_batches_missed",
        "Batches of KV events that a subscriber missed because it was too slow",
        |counters| vec![(None, counters.missed_batches())],
    ),
    ("pegainfer:kv_event_restarts", "Times that the sequence of KV events began again", |counters| {
        Restart::ALL.map(|reason| (Some(reason.name()), counters.restarts(reason))).to_vec()
    }),
];

impl Collector for KvEventsCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let models = self.0.read();
        let published: Vec<&ServedModel> = models.iter().filter(|model| !model.kv_events.is_empty()).collect();
        if published.is_empty() {
            return Ok(());
        }
        for (name, help, values) in COUNTERS {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for model in &published {
                for (engine, counters) in model.kv_events.iter().enumerate() {
                    let engine = engine.to_string();
                    for (reason, value) in values(counters) {
                        let reason = reason.map(|reason| ("reason", reason));
                        let labels = [Some(("model_name", &*model.name)), Some(("engine", &*engine)), reason];
                        let labels: Vec<(&str, &str)> = labels.into_iter().flatten().collect();
                        ConstCounter::new(value).encode(metric.encode_family(&labels)?)?;
                    }
                }
            }
        }
        Ok(())
    }
}
