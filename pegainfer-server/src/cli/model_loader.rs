//! Loads a model when it is asked for.

use super::kv_events::{self, KvEventsArgs};
use super::lora::LoraArgs;
use crate::models::{LoadModel, Placement, Prepared, Started, Text, TextSide};
use crate::text_service::Checkpoint;
use anyhow::Result;
use pegainfer_models::args::EngineArgs;
use pegainfer_models::engine::{self, family::LoadedEngine};
use pegainfer_models::model_path;
use tokio::runtime::Handle;

/// Loads a checkpoint with its own flags.
pub struct ModelLoader {
    /// Its flags.
    pub engine: EngineArgs,
    /// Its adapters.
    pub lora: LoraArgs,
    /// Its KV events.
    pub kv_events: KvEventsArgs,
    /// Its names.
    pub names: Vec<String>,
    /// Runs the probes of adapters.
    pub runtime: Handle,
}

impl LoadModel for ModelLoader {
    fn prepare(&self, text: Option<Box<Text>>) -> Result<Prepared> {
        let dir = model_path::resolve(&self.engine)?;
        let bytes = engine::memory(&dir.dir, &self.engine)?;
        let text = match text {
            Some(text) => TextSide::Kept(text),
            None => {
                let (path, id, origin, task) = (dir.dir.clone(), dir.hub_id.clone(), dir.origin(), self.engine.task);
                TextSide::read(move || Ok(Checkpoint::load_for(&path, task)?.with_source(id, origin)))?
            }
        };
        let (args, lora, names, runtime) =
            (self.engine.clone(), self.lora.clone(), self.names.clone(), self.runtime.clone());
        let events = self.kv_events.clone();
        let start = move || {
            let bound = events.bind(args.data_parallel_size)?;
            let mut engine = engine::load(&dir.dir, &args)?;
            let adapters = lora.adapters(engine.adapters.take(), args.max_loras.into(), names.iter())?;
            let kv_events = kv_events::publish(bound, &names[0], &engine.handle, adapters.as_ref())?;
            if let Some(adapters) = &adapters {
                runtime.block_on(lora.load_modules(adapters, &engine.handle))?;
            }
            let (summary, placement) = (load_summary(&engine), Some(placement(&engine)));
            Ok(Started { engine: engine.handle, adapters, kv_events, placement, summary })
        };
        Ok(Prepared { bytes, text, start: Box::new(start) })
    }
}

/// Where the weights of an engine are.
pub fn placement(engine: &LoadedEngine) -> Placement {
    let LoadedEngine { family, ranks, weight_bytes, .. } = *engine;
    Placement { family, device: engine.device.clone(), ranks, weight_bytes }
}

/// Summary of loading: time and memory.
pub fn load_summary(engine: &LoadedEngine) -> String {
    let (weights, seconds) = (engine.weight_bytes as f64 / 1e9, engine.weights_time.as_secs_f64());
    format!(
        "weights {weights:.2} GB in {seconds:.2} s ({:.1} GB/s), KV cache {} blocks ({:.2} GB)",
        weights / seconds.max(1e-9),
        engine.handle.stats().kv_blocks_total,
        engine.kv_bytes as f64 / 1e9
    )
}
