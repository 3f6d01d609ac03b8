//! Gauges and counters of the engine.

use pegainfer_core::engine::EngineHandle;
use pegainfer_core::ledger::StepTotals;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use std::fmt;

/// Reads the engine's statistics at each scrape.
pub(super) struct EngineCollector(pub EngineHandle);

impl fmt::Debug for EngineCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EngineCollector")
    }
}

impl EngineCollector {
    /// Encodes the counters of an engine with drafts.
    fn encode_speculation(&self, encoder: &mut DescriptorEncoder) -> fmt::Result {
        let Some(drafts) = self.0.limits().num_speculative_tokens else { return Ok(()) };
        let stats = self.0.stats().speculation;
        for (name, help, value) in [
            ("vllm:spec_decode_num_drafts", "Times that a sequence's drafts were verified", stats.drafts),
            ("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified", stats.draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted", stats.accepted_tokens()),
        ] {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        let name = "vllm:spec_decode_num_accepted_tokens_per_pos";
        let help = "Draft tokens that were accepted, by their position in the draft";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (position, accepted) in stats.accepted.iter().take(drafts).enumerate() {
            ConstCounter::new(*accepted).encode(family.encode_family(&[("position", position.to_string())])?)?;
        }
        Ok(())
    }
}

/// A sum over the steps of one kind.
type Sum = fn(&StepTotals) -> f64;

impl EngineCollector {
    /// Encodes step times by kind, and their comparison with `--ledger`.
    fn encode_steps(&self, encoder: &mut DescriptorEncoder) -> fmt::Result {
        let Some(log) = self.0.step_log() else { return Ok(()) };
        let (name, help) = ("pegainfer:step_seconds", "Time of an engine step");
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (kind, totals) in log.totals() {
            let labels = [("kind", kind.name())];
            let mut histogram = family.encode_family(&labels)?;
            histogram.encode_histogram::<NoLabelSet>(totals.seconds, totals.count(), &totals.buckets(), None)?;
        }
        if !log.is_watched() {
            return Ok(());
        }
        let sums: [(&str, &str, Sum); 2] = [
            ("pegainfer:step_predicted_seconds", "Time that the ledger predicts for steps", |totals| totals.predicted),
            ("pegainfer:step_measured_seconds", "Time of the steps that the ledger predicts", |totals| {
                totals.predictable
            }),
        ];
        for (name, help, value) in sums {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (kind, totals) in log.totals() {
                ConstCounter::new(value(&totals)).encode(family.encode_family(&[("kind", kind.name())])?)?;
            }
        }
        let name = "pegainfer:step_anomalies";
        let help = "Steps that took more than twice as long as predicted, by what was found out about them";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (cause, steps) in log.anomalies() {
            ConstCounter::new(steps).encode(family.encode_family(&[("cause", cause.name())])?)?;
        }
        let (name, help) = ("pegainfer:step_drift_ratio", "Step time relative to the first two minutes");
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (kind, ratio, _) in log.drifts() {
            ConstGauge::new(ratio).encode(family.encode_family(&[("kind", kind.name())])?)?;
        }
        let (name, help) = ("pegainfer:step_drifts", "Times that the time of steps has moved by 5 % or more");
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (kind, _, drifts) in log.drifts() {
            ConstCounter::new(drifts).encode(family.encode_family(&[("kind", kind.name())])?)?;
        }
        Ok(())
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
            ("vllm:kv_cache_usage_perc", "Fraction of the KV blocks that requests hold, 0 to 1", usage),
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
            ("pegainfer:failed_steps", "Steps that failed on a device that went on", stats.failed_steps),
        ] {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        self.encode_speculation(&mut encoder)?;
        let computed = stats.prompt_tokens.saturating_sub(stats.prefix_hits);
        let name = "vllm:prompt_tokens_by_source";
        let help = "Prompt tokens of admitted requests, by whether they were computed or found in the prefix cache";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (source, value) in [("local_compute", computed), ("local_cache_hit", stats.prefix_hits)] {
            ConstCounter::new(value).encode(family.encode_family(&[("source", source)])?)?;
        }
        // Requests wait only until they fit; none is deferred.
        let (name, help) =
            ("vllm:num_requests_waiting_by_reason", "Requests accepted and not yet running, by the reason");
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (reason, value) in [("capacity", stats.waiting as f64), ("deferred", 0.0)] {
            ConstGauge::new(value).encode(family.encode_family(&[("reason", reason)])?)?;
        }
        let steps = self.0.step_tokens();
        let name = "vllm:iteration_tokens_total";
        let help = "Tokens of one engine step: prompts of the requests it admitted, and tokens it generated";
        let mut histogram = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        histogram.encode_histogram::<NoLabelSet>(steps.sum as f64, steps.count(), &steps.buckets(), None)?;
        self.encode_steps(&mut encoder)?;
        let labels = [
            ("block_size", limits.block_size.to_string()),
            ("cache_dtype", limits.kv_cache_dtype.to_owned()),
            ("num_gpu_blocks", limits.kv_blocks.to_string()),
        ];
        let info = ConstGauge::new(1i64);
        let mut family =
            encoder.encode_descriptor("vllm:cache_config_info", "Size of the KV cache", None, info.metric_type())?;
        info.encode(family.encode_family(&labels)?)
    }
}
