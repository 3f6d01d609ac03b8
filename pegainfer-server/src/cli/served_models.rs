//! The models of `serve`, at its start.

use super::kv_events;
use super::local_server::LoadedModel;
use super::model_loader::{load_summary, placement};
use super::serve_args::ServeArgs;
use super::watch;
use crate::app::Options;
use crate::kv_events::BoundKvEvents;
use crate::metrics::Metrics;
use crate::models::{Model, ModelSpec, Models, Status, Text};
use crate::text_service::GrammarTrial;
use anyhow::{Context, Result, bail, ensure};
use pegainfer_models::engine::family::LoadedEngine;
use std::sync::Arc;
use tokio::runtime::Handle;

/// The models of the server.
pub struct ServedModels {
    /// The models.
    pub models: Arc<Models>,
    /// The metrics of the server and its models.
    pub metrics: Arc<Metrics>,
    /// What was loaded, for the log.
    pub summary: String,
}

impl ServedModels {
    /// The models of the server. Those that stay are in memory: the model of `--model-path`, or the bundled one if there are
    /// no others, and the pinned models of `--models`.
    pub fn load(args: &ServeArgs, options: &Options, runtime: &Handle) -> Result<Self> {
        let is_alone = args.record.is_none() && args.ledger.is_none();
        ensure!(is_alone || !args.on_demand.is_used(), "--record and --ledger need one model: leave out --models");
        let mut specs = args.on_demand.specs(&args.engine, runtime)?;
        let own = if specs.is_empty() || args.engine.model_path.is_some() {
            let bound = args.kv_events.bind(args.engine.data_parallel_size)?;
            let loaded = LoadedModel::load(&args.engine)?;
            let name = vec![loaded.checkpoint.name.clone()];
            let names = if args.served_model_name.is_empty() { name } else { args.served_model_name.clone() };
            specs.insert(0, ModelSpec::pinned(names));
            Some((loaded, bound))
        } else {
            let is_on = args.kv_events.is_on();
            ensure!(!is_on, "--kv-events-config is for the model of --model-path: set it in the table of a model");
            None
        };
        check_names(&specs)?;
        let metrics = Arc::new(Metrics::new(&specs[0].names[0], options.recorder.clone()));
        let (limits, trial) = (args.on_demand.limits(&args.engine)?, options.grammar_trial.clone());
        let models = Models::new(specs, limits, metrics.clone(), trial.clone());
        let mut summaries = Vec::new();
        if let Some((loaded, bound)) = own {
            warn_of_salts(args, options);
            summaries.push(put_first(args, loaded, bound, (&models, &metrics, trial), (options, runtime))?);
        }
        for status in models.statuses().into_iter().filter(|model| model.pinned && model.status != Status::Loaded) {
            runtime.block_on(models.load(status.id))?;
            summaries.push(format!("{} is pinned", status.names[0]));
        }
        if args.on_demand.is_used() {
            models.tend().context("the thread that unloads models cannot be started")?;
            summaries.push("other models are loaded when they are asked for".to_owned());
        }
        Ok(Self { models, metrics, summary: summaries.join("; ") })
    }
}

/// Puts the model of `--model-path` in the first place. Returns what was loaded.
fn put_first(
    args: &ServeArgs,
    LoadedModel { mut engine, checkpoint, source }: LoadedModel,
    bound: Option<BoundKvEvents>,
    (models, metrics, trial): (&Models, &Metrics, Option<GrammarTrial>),
    (options, runtime): (&Options, &Handle),
) -> Result<String> {
    announce(&engine, &source);
    if let Some(recorder) = options.recorder.as_ref().filter(|_| args.record_steps) {
        engine.handle.record_schedule(|engine| recorder.schedule(engine))?;
    }
    if let Some(file) = &args.ledger {
        watch::watch(file, &engine, &source, &args.engine, args.http.trace_dir.as_deref())?;
    }
    let summary = load_summary(&engine);
    let own = args.served_model_name.iter().chain([&checkpoint.name]);
    let adapters = args.lora.adapters(engine.adapters.take(), args.engine.max_loras.into(), own)?;
    let id = models.find(None).context("there is no model")?;
    let names = models.names(id);
    let kv_events = kv_events::publish(bound, &names[0], &engine.handle, adapters.as_ref())?;
    if let Some(adapters) = &adapters {
        runtime.block_on(args.lora.load_modules(adapters, &engine.handle))?;
    }
    let bytes = engine.weight_bytes + engine.kv_bytes;
    let (text, placement) = (Text::new(checkpoint, &engine.handle, trial), placement(&engine));
    let model = Model::new(names, engine.handle, text, adapters, kv_events, metrics).placed(Some(placement));
    models.put(id, model, bytes);
    Ok(summary)
}

/// Warns if routers learn nothing because each API key has a prefix cache of its own.
fn warn_of_salts(args: &ServeArgs, options: &Options) {
    if args.kv_events.is_on() && !options.api_keys.is_empty() && !options.limits.share_prefix_cache {
        log::warn!("KV events leave out prompts of API keys, whose caches are separate: give --share-prefix-cache");
    }
}

/// Refuses a name that two models have.
fn check_names(specs: &[ModelSpec]) -> Result<()> {
    let names = || specs.iter().flat_map(|spec| spec.names.iter().chain(&spec.adapters));
    match names().enumerate().find(|(i, name)| names().take(*i).any(|other| other == *name)) {
        Some((_, name)) => bail!("the name {name} is given to two models or adapters"),
        None => Ok(()),
    }
}

fn announce(engine: &LoadedEngine, source: &str) {
    let (limits, engines) = (engine.handle.limits(), engine.handle.engines().len());
    let on = if engines > 1 { format!("{engines} engines, each on {}", engine.device) } else { engine.device.clone() };
    log::info!("model: {} from {source}, on {on}", engine.family);
    log::info!(
        "KV cache{}: {} tokens ({} blocks of {}, {}), see --kv-cache-memory; context {} tokens, see --max-model-len; up to {} concurrent \
         requests, see --max-num-seqs",
        if engines > 1 { " of each" } else { "" },
        limits.kv_capacity_tokens(),
        limits.kv_blocks,
        limits.block_size,
        limits.kv_cache_dtype,
        limits.max_model_len,
        limits.max_num_seqs
    );
}
