//! The adapters of open requests, as llm-d's router reads them.

use super::served::ServedModels;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;
use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

/// Reads the adapters of open requests at each scrape.
pub(super) struct LoraCollector(pub(super) ServedModels);

impl fmt::Debug for LoraCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LoraCollector")
    }
}

impl Collector for LoraCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let models = self.0.read();
        let mut with_adapters = models.iter().filter_map(|model| Some((model, model.adapters.as_ref()?))).peekable();
        if with_adapters.peek().is_none() {
            return Ok(());
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64());
        let gauge = ConstGauge::new(now);
        let help = "Adapters of requests that wait and that run; the value is the time of the scrape";
        let mut metric = encoder.encode_descriptor("vllm:lora_requests_info", help, None, gauge.metric_type())?;
        for (model, adapters) in with_adapters {
            let [waiting, running] = adapters.open_names().map(|names| names.join(","));
            // The series of a whole model also have an engine, as those of vLLM's first engine do.
            let labels = [
                ("model_name", model.name.to_string()),
                ("engine", "0".to_owned()),
                ("max_lora", adapters.max_loras.to_string()),
                ("waiting_lora_adapters", waiting),
                ("running_lora_adapters", running),
            ];
            gauge.encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
