//! Gauges and counters of copies of KV blocks and recurrent states outside the device.

use super::engine::{Scrape, Series, Value};
use pegainfer_core::kv::tiers::TierStats;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use std::fmt;

/// The counters of each engine with a tier.
const COUNTERS: [(&str, &str, Value<u64>); 8] = [
    ("vllm:external_prefix_cache_queries", "Prompt tokens looked up beyond the KV cache", |stats| stats.tiers.queries),
    ("vllm:external_prefix_cache_hits", "Prompt tokens loaded from beyond the KV cache", |stats| stats.tiers.hits),
    ("vllm:kv_offload_store_bytes", "Bytes of KV blocks copied to the host", |stats| {
        stats.tiers.stored_blocks * stats.tiers.slot_bytes as u64
    }),
    ("vllm:kv_offload_load_bytes", "Bytes of KV blocks copied from the host", |stats| {
        stats.tiers.loaded_blocks * stats.tiers.slot_bytes as u64
    }),
    ("pegainfer:kv_offload_skipped_stores", "Blocks not copied for lack of slots or time", |stats| {
        stats.tiers.stores_skipped
    }),
    ("pegainfer:kv_offload_refused_loads", "Loads that would have taken longer than computing", |stats| {
        stats.tiers.loads_refused
    }),
    ("pegainfer:kv_offload_corrupt_blocks", "Blocks with a wrong checksum, which were computed again", |stats| {
        stats.tiers.corrupt_blocks
    }),
    ("pegainfer:kv_offload_failed_copies", "Copies between device and host that failed", |stats| {
        stats.tiers.failed_transfers
    }),
];

/// The counters of each engine with a file.
const DISK_COUNTERS: [(&str, &str, Value<u64>); 2] = [
    ("pegainfer:kv_disk_written_bytes", "Bytes of KV blocks written to the file", |stats| {
        stats.tiers.written_blocks * stats.tiers.slot_bytes as u64
    }),
    ("pegainfer:kv_disk_read_bytes", "Bytes of KV blocks read from the file", |stats| {
        stats.tiers.read_blocks * stats.tiers.slot_bytes as u64
    }),
];

/// The counters of each engine with a tier and state outside of KV blocks.
const STATE_COUNTERS: [(&str, &str, Value<u64>); 2] = [
    ("pegainfer:kv_offload_state_store_bytes", "Bytes of recurrent states copied to the host", |stats| {
        stats.tiers.stored_states * stats.tiers.state_bytes as u64
    }),
    ("pegainfer:kv_offload_state_load_bytes", "Bytes of recurrent states copied from the host", |stats| {
        stats.tiers.loaded_states * stats.tiers.state_bytes as u64
    }),
];

/// The counters of each engine with a file for states.
const STATE_DISK_COUNTERS: [(&str, &str, Value<u64>); 2] = [
    ("pegainfer:kv_disk_state_written_bytes", "Bytes of recurrent states written to their file", |stats| {
        stats.tiers.written_states * stats.tiers.state_bytes as u64
    }),
    ("pegainfer:kv_disk_state_read_bytes", "Bytes of recurrent states read from their file", |stats| {
        stats.tiers.read_states * stats.tiers.state_bytes as u64
    }),
];

/// Nanoseconds of an engine's copies.
type Nanos = fn(&TierStats) -> u64;

/// Seconds of copies.
const TIMES: [(&str, &str, Nanos); 2] = [
    ("vllm:kv_offload_store_time", "Seconds of copies to the host", |tiers| tiers.store_nanos),
    ("vllm:kv_offload_load_time", "Seconds of copies from the host", |tiers| tiers.load_nanos),
];

impl Scrape<'_> {
    /// Encodes the metrics of engines with a tier.
    pub(super) fn encode_tiers(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let this = self.only(|model| model.engine.stats().tiers.host_slots > 0);
        let this = Scrape(&this);
        if this.engines().next().is_none() {
            return Ok(());
        }
        let (name, help) =
            ("vllm:kv_offload_cpu_cache_usage_perc", "Fraction of the host's slots that are used, 0 to 1");
        let mut series = Series::new(encoder, MetricType::Gauge, name, help)?;
        for (origin, engine) in this.engines() {
            let TierStats { host_slots, host_used, .. } = engine.stats().tiers;
            series.add(origin, None, &ConstGauge::new(host_used as f64 / host_slots.max(1) as f64))?;
        }
        this.encode_counters(encoder, &COUNTERS)?;
        for (name, help, nanos) in TIMES {
            let mut series = Series::new(encoder, MetricType::Counter, name, help)?;
            for (origin, engine) in this.engines() {
                series.add(origin, None, &ConstCounter::new(nanos(&engine.stats().tiers) as f64 / 1e9))?;
            }
        }
        this.encode_disk(encoder)?;
        this.encode_states(encoder)
    }

    /// Encodes the metrics of engines with a file.
    fn encode_disk(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let this = self.only(|model| model.engine.stats().tiers.disk_slots > 0);
        let this = Scrape(&this);
        if this.engines().next().is_none() {
            return Ok(());
        }
        let usage = |tiers: &TierStats| tiers.disk_used as f64 / tiers.disk_slots.max(1) as f64;
        this.encode_usage(
            encoder,
            ("pegainfer:kv_disk_usage_perc", "Fraction of the file's slots that are used, 0 to 1"),
            usage,
        )?;
        this.encode_counters(encoder, &DISK_COUNTERS)?;
        let (name, help) = ("pegainfer:kv_disk_read_time", "Seconds of reads from the files");
        let mut series = Series::new(encoder, MetricType::Counter, name, help)?;
        for (origin, engine) in this.engines() {
            series.add(origin, None, &ConstCounter::new(engine.stats().tiers.read_nanos as f64 / 1e9))?;
        }
        Ok(())
    }

    /// Encodes the metrics of engines with copies of states.
    fn encode_states(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let this = self.only(|model| model.engine.stats().tiers.state_slots > 0);
        let this = Scrape(&this);
        if this.engines().next().is_none() {
            return Ok(());
        }
        let help = "Fraction of the host's slots for recurrent states that are used, 0 to 1";
        this.encode_usage(encoder, ("pegainfer:kv_offload_state_usage_perc", help), |tiers| {
            tiers.state_used as f64 / tiers.state_slots.max(1) as f64
        })?;
        this.encode_counters(encoder, &STATE_COUNTERS)?;
        let this = self.only(|model| model.engine.stats().tiers.state_disk_slots > 0);
        let this = Scrape(&this);
        if this.engines().next().is_none() {
            return Ok(());
        }
        let help = "Fraction of the file's slots for recurrent states that are used, 0 to 1";
        this.encode_usage(encoder, ("pegainfer:kv_disk_state_usage_perc", help), |tiers| {
            tiers.state_disk_used as f64 / tiers.state_disk_slots.max(1) as f64
        })?;
        this.encode_counters(encoder, &STATE_DISK_COUNTERS)
    }

    fn encode_usage(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        (name, help): (&str, &str),
        usage: fn(&TierStats) -> f64,
    ) -> fmt::Result {
        let mut series = Series::new(encoder, MetricType::Gauge, name, help)?;
        for (origin, engine) in self.engines() {
            series.add(origin, None, &ConstGauge::new(usage(&engine.stats().tiers)))?;
        }
        Ok(())
    }
}
