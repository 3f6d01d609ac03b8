//! Flags for several models in one server.

use super::model_loader::ModelLoader;
use super::models_file::{self, ModelEntry};
use crate::models::{ModelLimits, ModelSpec};
use anyhow::{Context, Result, ensure};
use clap::Args;
use pegainfer_models::args::EngineArgs;
use pegainfer_models::weight_memory::WeightMemory;
use pegainfer_terminal::values::{parse_bytes, parse_name, parse_seconds};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;

/// Flags for several models in one server.
#[derive(Debug, Clone, Args)]
pub struct OnDemandArgs {
    /// TOML file with a table for each model that requests may name; a model is loaded when it is asked for
    /// (docs/models/on-demand.md)
    #[arg(long, value_name = "FILE")]
    pub models: Option<PathBuf>,
    /// Serve each checkpoint in this folder under the name of its subfolder or GGUF file; it is loaded when it is asked
    /// for
    #[arg(long, value_name = "DIR")]
    pub models_dir: Option<PathBuf>,
    /// Memory for all loaded models together, such as 16G [default: nine tenths of this machine's; of the GPUs,
    /// --gpu-memory-utilization]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub models_memory: Option<u64>,
    /// Maximum number of models in memory [default: as many as fit]
    #[arg(long, value_name = "N")]
    pub max_loaded_models: Option<NonZeroUsize>,
    /// Unload a model that had no request for this long; the field keep_alive of a request overrides it [default: keep
    /// it until others need its memory]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub model_idle_time: Option<Duration>,
    /// Maximum time that a model waits for the running requests of models that have to leave
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = parse_seconds)]
    pub model_wait: Duration,
}

impl OnDemandArgs {
    /// True if models are loaded when they are asked for.
    pub fn is_used(&self) -> bool {
        self.models.is_some() || self.models_dir.is_some()
    }

    /// The models of `--models` and `--models-dir`. `base` has the flags of the command line, which they override.
    pub(super) fn specs(&self, base: &EngineArgs, runtime: &Handle) -> Result<Vec<ModelSpec>> {
        let mut entries = match &self.models {
            Some(file) => models_file::read(file, base)?,
            None => Vec::new(),
        };
        if let Some(dir) = &self.models_dir {
            entries.extend(in_directory(dir, base)?);
        }
        entries.into_iter().map(|entry| spec(entry, runtime)).collect()
    }

    /// The limits on loaded models.
    pub(super) fn limits(&self, args: &EngineArgs) -> Result<ModelLimits> {
        let args = EngineArgs { data_parallel_size: NonZeroUsize::MIN, ..args.clone() };
        let memory = match self.models_memory {
            Some(bytes) => Some(bytes),
            None => WeightMemory::chosen(&args)?.map(|memory| memory.for_models()),
        };
        Ok(ModelLimits {
            memory,
            max_loaded: self.max_loaded_models.map_or(usize::MAX, Into::into),
            idle_time: self.model_idle_time,
            wait: self.model_wait,
        })
    }
}

fn spec(entry: ModelEntry, runtime: &Handle) -> Result<ModelSpec> {
    let ModelEntry { names, pinned, idle_time, engine, lora, kv_events } = entry;
    for name in &names {
        parse_name(name)
            .map_err(anyhow::Error::msg)
            .with_context(|| format!("the model {name:?} needs another name"))?;
    }
    let adapters = lora.lora_modules.iter().map(|module| module.name.clone()).collect();
    let loader = ModelLoader { engine, lora, kv_events, names: names.clone(), runtime: runtime.clone() };
    Ok(ModelSpec { names, pinned, idle_time, adapters, loader: Some(Arc::new(loader)) })
}

/// The checkpoints in a folder, by their names.
fn in_directory(dir: &Path, base: &EngineArgs) -> Result<Vec<ModelEntry>> {
    let unreadable = || format!("--models-dir {} cannot be read", dir.display());
    let paths = std::fs::read_dir(dir).with_context(unreadable)?.map(|entry| Ok(entry?.path()));
    let mut paths: Vec<PathBuf> = paths.collect::<std::io::Result<_>>().with_context(unreadable)?;
    paths.sort();
    let entries: Vec<ModelEntry> = paths.iter().filter_map(|path| in_path(path, base)).collect();
    ensure!(!entries.is_empty(), "--models-dir {} has no folder with a checkpoint and no GGUF file", dir.display());
    Ok(entries)
}

/// The checkpoint in a folder or GGUF file; `None` if there is none.
fn in_path(path: &Path, base: &EngineArgs) -> Option<ModelEntry> {
    let is_gguf = |path: &Path| path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    let holds_gguf = || std::fs::read_dir(path).ok()?.flatten().map(|entry| entry.path()).find(|path| is_gguf(path));
    let (path, name) = if path.join("config.json").is_file() {
        (path.to_owned(), path.file_name()?)
    } else if path.is_dir() {
        (holds_gguf()?, path.file_name()?)
    } else if is_gguf(path) {
        (path.to_owned(), path.file_stem()?)
    } else {
        return None;
    };
    let engine = EngineArgs { model_path: Some(path.to_str()?.to_owned()), revision: None, ..base.clone() };
    Some(ModelEntry::new(name.to_str()?.to_owned(), engine))
}
