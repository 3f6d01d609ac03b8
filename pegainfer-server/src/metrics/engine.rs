//! Gauges and counters of the engines.

use super::served::{Origin, ServedModel, ServedModels, engines};
use pegainfer_core::engine::{EngineCell, EngineStats, RouteReason};
use pegainfer_core::ledger::{ExpertLoad, StepTotals};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use std::fmt;

/// Reads the engines' statistics at each scrape.
pub(super) struct EngineCollector(pub ServedModels);

/// The models of one scrape.
pub(super) struct Scrape<'a>(pub &'a [ServedModel]);

impl fmt::Debug for EngineCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EngineCollector")
    }
}

/// Writes the series of one metric.
pub(super) struct Series<'a>(MetricEncoder<'a>);

impl<'a> Series<'a> {
    pub fn new(
        encoder: &'a mut DescriptorEncoder<'_>,
        kind: MetricType,
        name: &'a str,
        help: &'a str,
    ) -> Result<Self, fmt::Error> {
        Ok(Self(encoder.encode_descriptor(name, help, None, kind)?))
    }

    /// Adds the value of an engine; `label` is a label other than its origin's.
    pub fn add(&mut self, origin: Origin<'_>, label: Option<(&str, &str)>, value: &impl EncodeMetric) -> fmt::Result {
        let engine = origin.engine.to_string();
        let labels = [Some(("model_name", origin.model)), Some(("engine", &*engine)), label];
        let labels: Vec<(&str, &str)> = labels.into_iter().flatten().collect();
        value.encode(self.0.encode_family(&labels)?)
    }
}

/// A value of an engine's statistics.
pub(super) type Value<T> = fn(&EngineStats) -> T;

/// The gauges of each engine.
const GAUGES: [(&str, &str, Value<f64>); 4] = [
    ("vllm:num_requests_running", "Requests that hold KV blocks", |stats| stats.running as f64),
    ("vllm:num_requests_waiting", "Requests accepted and not yet running", |stats| stats.waiting as f64),
    ("vllm:kv_cache_usage_perc", "Fraction of the KV blocks that requests hold, 0 to 1", kv_usage),
    ("vllm:gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc, which AIBrix reads", kv_usage),
];

/// Fraction of the KV blocks that requests hold, 0 to 1.
fn kv_usage(stats: &EngineStats) -> f64 {
    let used = stats.kv_blocks_total.saturating_sub(stats.kv_blocks_free);
    used as f64 / stats.kv_blocks_total.max(1) as f64
}

/// The counters of each engine.
const COUNTERS: [(&str, &str, Value<u64>); 7] = [
    ("vllm:prompt_tokens", "Prompt tokens of admitted requests", |stats| stats.prompt_tokens),
    ("vllm:generation_tokens", "Tokens generated", |stats| stats.generation_tokens),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", |stats| stats.prefix_queries),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", |stats| stats.prefix_hits),
    ("vllm:prompt_tokens_cached", "Prompt tokens that were not computed again", |stats| stats.prefix_hits),
    ("vllm:num_preemptions", "Requests that lost their KV blocks and were queued again", |stats| stats.preemptions),
    ("pegainfer:failed_steps", "Steps that failed on a device that went on", |stats| stats.failed_steps),
];

/// The counters of each engine with drafts.
const DRAFT_COUNTERS: [(&str, &str, Value<u64>); 3] = [
    ("vllm:spec_decode_num_drafts", "Times that a sequence's drafts were verified", |stats| stats.speculation.drafts),
    ("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified", |stats| stats.speculation.draft_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted", |stats| {
        stats.speculation.accepted_tokens()
    }),
];

/// A sum over the steps of one kind.
type Sum = fn(&StepTotals) -> f64;

impl Scrape<'_> {
    pub(super) fn engines(&self) -> impl Iterator<Item = (Origin<'_>, &EngineCell)> {
        engines(self.0)
    }

    /// The models for which `is` is true.
    pub(super) fn only(&self, is: impl Fn(&ServedModel) -> bool) -> Vec<ServedModel> {
        self.0.iter().filter(|model| is(model)).cloned().collect()
    }

    pub(super) fn encode_counters(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        counters: &[(&str, &str, Value<u64>)],
    ) -> fmt::Result {
        for (name, help, value) in counters {
            let mut series = Series::new(encoder, MetricType::Counter, name, help)?;
            for (i, engine) in self.engines() {
                series.add(i, None, &ConstCounter::new(value(&engine.stats())))?;
            }
        }
        Ok(())
    }

    /// Encodes the counters of engines with drafts.
    fn encode_speculation(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let drafting = self.only(|model| model.engine.limits().num_speculative_tokens.is_some());
        if drafting.is_empty() {
            return Ok(());
        }
        let this = Scrape(&drafting);
        this.encode_counters(encoder, &DRAFT_COUNTERS)?;
        let name = "vllm:spec_decode_num_accepted_tokens_per_pos";
        let help = "Draft tokens that were accepted, by their position in the draft";
        let mut series = Series::new(encoder, MetricType::Counter, name, help)?;
        for (i, engine) in this.engines() {
            let drafts = engine.limits().num_speculative_tokens.unwrap_or(0);
            for (position, accepted) in engine.stats().speculation.accepted.iter().take(drafts).enumerate() {
                series.add(i, Some(("position", &position.to_string())), &ConstCounter::new(*accepted))?;
            }
        }
        Ok(())
    }

    /// Encodes step times by kind, and their comparison with `--ledger`.
    fn encode_steps(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let logs = || self.engines().filter_map(|(i, engine)| Some((i, engine.step_log()?)));
        if logs().next().is_none() {
            return Ok(());
        }
        let (name, help) = ("pegainfer:step_seconds", "Time of an engine step");
        let mut series = Series::new(encoder, MetricType::Histogram, name, help)?;
        for (i, log) in logs() {
            for (kind, totals) in log.totals() {
                let buckets = Buckets { sum: totals.seconds, count: totals.count(), buckets: &totals.buckets() };
                series.add(i, Some(("kind", kind.name())), &buckets)?;
            }
        }
        let watched = || logs().filter(|(_, log)| log.is_watched());
        if watched().next().is_none() {
            return Ok(());
        }
        let sums: [(&str, &str, Sum); 2] = [
            ("pegainfer:step_predicted_seconds", "Time that the ledger predicts for steps", |totals| totals.predicted),
            ("pegainfer:step_measured_seconds", "Time of the steps that the ledger predicts", |totals| {
                totals.predictable
            }),
        ];
        for (name, help, value) in sums {
            let mut series = Series::new(encoder, MetricType::Counter, name, help)?;
            for (i, log) in watched() {
                for (kind, totals) in log.totals() {
                    series.add(i, Some(("kind", kind.name())), &ConstCounter::new(value(&totals)))?;
                }
            }
        }
        let name = "pegainfer:step_anomalies";
        let help = "Steps that took more than twice as long as predicted, by what was found out about them";
        let mut series = Series::new(encoder, MetricType::Counter, name, help)?;
        for (i, log) in watched() {
            for (cause, steps) in log.anomalies() {
                series.add(i, Some(("cause", cause.name())), &ConstCounter::new(steps))?;
            }
        }
        let (name, help) = ("pegainfer:step_drift_ratio", "Step time relative to the first two minutes");
        let mut series = Series::new(encoder, MetricType::Gauge, name, help)?;
        for (i, log) in watched() {
            for (kind, ratio, _) in log.drifts() {
                series.add(i, Some(("kind", kind.name())), &ConstGauge::new(ratio))?;
            }
        }
        let (name, help) = ("pegainfer:step_drifts", "Times that the time of steps has moved by 5 % or more");
        let mut series = Series::new(encoder, MetricType::Counter, name, help)?;
        for (i, log) in watched() {
            for (kind, _, drifts) in log.drifts() {
                series.add(i, Some(("kind", kind.name())), &ConstCounter::new(drifts))?;
            }
        }
        Ok(())
    }

    /// Encodes how evenly tokens spread over the experts of engines that have them.
    fn encode_experts(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let loads = || self.engines().filter_map(|(i, engine)| Some((i, engine.step_log()?.experts()?)));
        if loads().next().is_none() {
            return Ok(());
        }
        let name = "pegainfer:expert_tokens";
        let help = "Tokens of one expert in one layer of a step; one step in 16 is counted, each layer in turn";
        let mut series = Series::new(encoder, MetricType::Histogram, name, help)?;
        for (i, ExpertLoad { tokens, .. }) in loads() {
            series.add(i, None, &Buckets { sum: tokens.sum, count: tokens.count(), buckets: &tokens.buckets() })?;
        }
        let name = "pegainfer:expert_load_ratio";
        let help =
            "Tokens of the most loaded expert of a layer over the mean, over counted steps with a mean of 16 tokens";
        let mut series = Series::new(encoder, MetricType::Histogram, name, help)?;
        for (i, ExpertLoad { ratio, .. }) in loads() {
            series.add(i, None, &Buckets { sum: ratio.sum, count: ratio.count(), buckets: &ratio.buckets() })?;
        }
        Ok(())
    }

    /// Encodes the number of healthy engines, and where requests went.
    fn encode_routes(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let (name, help) = ("pegainfer:engines_healthy", "Engines that make progress");
        let mut gauge = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for model in self.0 {
            let healthy = model.engine.engines().iter().filter(|engine| engine.is_healthy()).count();
            ConstGauge::new(healthy as f64).encode(gauge.encode_family(&[("model_name", &*model.name)])?)?;
        }
        let (name, help) = ("pegainfer:routes", "Requests that an engine was sent by the router, by the reason");
        let mut series = Series::new(encoder, MetricType::Counter, name, help)?;
        let routes = self.0.iter().flat_map(|model| {
            let origin = |engine| Origin { model: &model.name, engine };
            model.engine.routes().into_iter().enumerate().map(move |(engine, counts)| (origin(engine), counts))
        });
        for (i, counts) in routes {
            for (reason, requests) in RouteReason::ALL.into_iter().zip(counts) {
                series.add(i, Some(("reason", reason.name())), &ConstCounter::new(requests))?;
            }
        }
        Ok(())
    }
}

/// A histogram with known buckets.
struct Buckets<'a> {
    sum: f64,
    count: u64,
    buckets: &'a [(f64, u64)],
}

impl EncodeMetric for Buckets<'_> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        encoder.encode_histogram::<NoLabelSet>(self.sum, self.count, self.buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

impl Collector for EngineCollector {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        Scrape(&self.0.read()).encode(encoder)
    }
}

impl Scrape<'_> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (name, help, value) in GAUGES {
            let mut series = Series::new(&mut encoder, MetricType::Gauge, name, help)?;
            for (i, engine) in self.engines() {
                series.add(i, None, &ConstGauge::new(value(&engine.stats())))?;
            }
        }
        self.encode_counters(&mut encoder, &COUNTERS)?;
        self.encode_speculation(&mut encoder)?;
        self.encode_tiers(&mut encoder)?;
        let name = "vllm:prompt_tokens_by_source";
        let help = "Prompt tokens of admitted requests, by whether they were computed or found in the prefix cache";
        let mut series = Series::new(&mut encoder, MetricType::Counter, name, help)?;
        for (i, engine) in self.engines() {
            let stats = engine.stats();
            let computed = stats.prompt_tokens.saturating_sub(stats.prefix_hits);
            for (source, value) in [("local_compute", computed), ("local_cache_hit", stats.prefix_hits)] {
                series.add(i, Some(("source", source)), &ConstCounter::new(value))?;
            }
        }
        // Requests wait only until they fit; none is deferred.
        let (name, help) =
            ("vllm:num_requests_waiting_by_reason", "Requests accepted and not yet running, by the reason");
        let mut series = Series::new(&mut encoder, MetricType::Gauge, name, help)?;
        for (i, engine) in self.engines() {
            for (reason, value) in [("capacity", engine.stats().waiting as f64), ("deferred", 0.0)] {
                series.add(i, Some(("reason", reason)), &ConstGauge::new(value))?;
            }
        }
        let name = "vllm:iteration_tokens_total";
        let help = "Tokens of one engine step: prompts of the requests it admitted, and tokens it generated";
        let mut series = Series::new(&mut encoder, MetricType::Histogram, name, help)?;
        for (i, engine) in self.engines() {
            let steps = engine.step_tokens();
            let buckets = Buckets { sum: steps.sum as f64, count: steps.count(), buckets: &steps.buckets() };
            series.add(i, None, &buckets)?;
        }
        self.encode_steps(&mut encoder)?;
        self.encode_experts(&mut encoder)?;
        self.encode_routes(&mut encoder)?;
        let (name, help) = ("vllm:cache_config_info", "Size of the KV cache");
        let mut info = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (i, engine) in self.engines() {
            let limits = engine.limits();
            let labels = [
                ("model_name", i.model.to_owned()),
                ("engine", i.engine.to_string()),
                ("block_size", limits.block_size.to_string()),
                ("cache_dtype", limits.kv_cache_dtype.to_owned()),
                ("num_gpu_blocks", limits.kv_blocks.to_string()),
            ];
            ConstGauge::new(1i64).encode(info.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
