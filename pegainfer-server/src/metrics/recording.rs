//! Counters of the recording (`--record`); 0 without one.

use crate::record::Recorder;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use std::fmt;
use std::sync::Arc;

/// Reads the state of the recording at each scrape.
#[derive(Debug)]
pub(super) struct RecordingCollector(pub(super) Option<Arc<Recorder>>);

impl Collector for RecordingCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let ended = self.0.as_ref().is_some_and(|recorder| recorder.has_ended());
        let lost = self.0.as_ref().map_or(0, |recorder| recorder.lost_lines());
        for (name, help, value) in [
            (
                "pegainfer:recordings_ended",
                "Recordings that ended before the server: the disk is full, or the maximum size is reached",
                u64::from(ended),
            ),
            ("pegainfer:recording_lines_dropped", "Lines that are missing in the recording", lost),
        ] {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        Ok(())
    }
}
