//! Loads a checkpoint into an engine that is ready for its thread.

use super::bounds::Bounds;
use super::executor::Executor;
use super::gpu_fit::with_enough_gpus;
use super::load_error::LoadError;
use super::load_options::LoadOptions;
use super::lora::{AdapterLoader, LoraOptions};
use super::model::{Model, shard_config};
use super::model_info::{ModelBytes, ModelInfo};
use super::output_matrix::HEAD;
use super::synthetic_acceptance::SyntheticAcceptance;
use super::tiers;
use super::warm_up::warm_up;
use pegainfer_core::engine::EngineLimits;
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::Shard;
use pegainfer_core::schedule::{EngineCore, TokenBudget};
use pegainfer_core::weights::{Loader, Source, WeightsError};
use pegainfer_kernels::ops;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Ends of the names of scales that quantised checkpoints have for rounded activations and an FP8 KV cache.
const SCALES: [&str; 4] = [".input_scale", ".input_global_scale", ".k_scale", ".v_scale"];

/// The engine of a model.
pub type ModelEngine<M> = EngineCore<Executor<M>>;

/// A loaded engine, ready for its thread, and the facts that start-up prints.
#[derive(Debug)]
pub struct Loaded<M: Model> {
    /// The engine.
    pub engine: ModelEngine<M>,
    /// The model's numbers.
    pub config: M::Config,
    /// Bytes of the weights of all ranks.
    pub weight_bytes: u64,
    /// Bytes of K and V of one token over all layers and ranks.
    pub kv_per_token: u64,
    /// Time from the first weight to the last, on the device.
    pub weights_time: Duration,
    /// Loads adapters, if enabled.
    pub adapters: Option<AdapterLoader>,
}

/// Loads a checkpoint onto one rank per `execs`, rank 0 first, and runs a pass through the model, which refuses what it
/// cannot run. `progress` is called with (bytes of this chunk, bytes of all weights).
pub fn load<M: Model>(
    mut execs: Vec<Exec>,
    options: &LoadOptions<M::Options>,
    progress: &mut (dyn FnMut(u64, u64) + Send),
) -> Result<Loaded<M>, LoadError> {
    let config = M::load_config_for(options)?;
    let info = M::info(&config);
    check_eos(&info)?;
    tiers::check(options)?;
    let ranks = options.loop_back_ranks.unwrap_or(execs.len());
    let shards: Vec<Shard> = Shard::all(ranks).take(execs.len()).collect();
    let bytes = ModelBytes::with_drafts::<M>(&shard_config::<M>(&config, Shard { rank: 0, ranks })?, options.drafts())?;
    let adapters = adapter_loader::<M>(&config, options.lora, &shards)?;
    let slots = adapters.as_ref().zip(options.lora).map_or(0, |(loader, lora)| loader.slot_bytes(lora.max_loras));
    let bytes = ModelBytes { derived: bytes.derived + slots, ..bytes };
    let source = match options.dummy_seed {
        Some(seed) => {
            Source::Dummy { seed, std: info.initializer_range, uniform: ops::uniform, random_bytes: ops::random_bytes }
        }
        None if options.overrides.router_skew => {
            return Err(LoadError::Option("--dummy-router-skew needs --load-format dummy".to_owned()));
        }
        None => Source::open(&options.model_path)?,
    };
    if let Source::Checkpoint(checkpoint) = &source {
        M::check_checkpoint(&config, checkpoint)?;
    }
    let bounds = Bounds::new(&info, &bytes, options, &mut execs).map_err(|error| {
        let free = execs[0].gpu().and_then(|gpu| gpu.info()).map_or(0, |gpu| gpu.free as u64);
        with_enough_gpus::<M>(error, &config, options, (ranks, free))
    })?;
    let start = Instant::now();
    let weight_bytes = bytes.weights * shards.len() as u64;
    let mut ranks: Vec<(Exec, Shard)> = execs.into_iter().zip(shards).collect();
    let mut progress = |loaded| progress(loaded, weight_bytes);
    let weights = load_rank_weights::<M>(&mut ranks, &config, &source, &mut progress)?;
    let weights_time = start.elapsed();
    let ranks = ranks.into_iter().zip(weights).map(|((exec, shard), weights)| (exec, shard, weights)).collect();
    let allocating = Instant::now();
    let mut executor = Executor::<M>::new(config.clone(), ranks, &bounds)?;
    log::debug!("KV cache and workspace after {:.3} s", allocating.elapsed().as_secs_f64());
    if options.check_ranks {
        executor.check_ranks();
    }
    warm_up(&mut executor, &bounds, options)?;
    executor.count_experts(bounds.size.tokens)?;
    executor.set_synthetic_acceptance(SyntheticAcceptance::of(options.speculation.as_ref()));
    let limits = EngineLimits {
        max_model_len: bounds.size.context,
        vocab_size: info.vocab_size,
        block_size: M::BLOCK_TOKENS,
        kv_blocks: executor.kv_blocks(),
        kv_cache_dtype: options.overrides.kv_dtype.name(),
        max_num_seqs: bounds.size.rows,
        eos_token_ids: info.eos_token_ids,
        num_speculative_tokens: options.speculation.as_ref().map(|speculation| speculation.num_tokens),
        image_token: info.image_token,
        unsupported: &[],
        max_loras: options.lora.map_or(0, |lora| lora.max_loras),
        hidden_size: executor.hidden_size(),
    };
    if bytes.state_slot > 0 {
        let (slot, rows, snapshots) = (bytes.state_slot as f64 / 1e6, bounds.size.rows, bounds.snapshots());
        log::info!(
            "state next to the KV cache: {slot:.1} MB for each of up to {rows} requests, and {snapshots} snapshots in \
             the prefix cache"
        );
    }
    let kv_per_token = bytes.kv_per_token * executor.held_ranks() as u64;
    let tokens = TokenBudget { step: bounds.size.tokens, mixed: options.max_num_mixed_tokens };
    let state = M::state(&config, &bounds);
    let mut engine = ModelEngine::<M>::new(executor, limits, tokens, state, options.speculation.clone());
    tiers::open::<M>(&mut engine, &config, options)?;
    Ok(Loaded { engine, config, weight_bytes, kv_per_token, weights_time, adapters })
}

/// Loads adapters for the model `config`, which these `shards` share; `None` if adapters are not enabled.
fn adapter_loader<M: Model>(
    config: &M::Config,
    lora: Option<LoraOptions>,
    shards: &[Shard],
) -> Result<Option<AdapterLoader>, LoadError> {
    let Some(LoraOptions { max_rank, .. }) = lora else { return Ok(None) };
    let adapted = |config: &M::Config| M::adapted(config).map_err(LoadError::Option);
    let ranks = shards.iter().map(|shard| adapted(&shard_config::<M>(config, *shard)?));
    let ranks = ranks.collect::<Result<_, LoadError>>()?;
    Ok(Some(AdapterLoader::new(&adapted(config)?, ranks, max_rank, M::skipped)))
}

/// Loads the weights of all ranks of the model `config`, each on its own thread; on return, all are on their devices.
/// Rows of a checkpoint that several ranks hold are read once. `progress` is called with the size in bytes of each
/// loaded chunk.
pub fn load_rank_weights<M: Model>(
    ranks: &mut [(Exec, Shard)],
    config: &M::Config,
    source: &Source,
    progress: &mut (dyn FnMut(u64) + Send),
) -> Result<Vec<M::Weights>, LoadError> {
    let configs = ranks.iter().map(|(_, shard)| shard_config::<M>(config, *shard));
    let configs = configs.collect::<Result<Vec<_>, LoadError>>()?;
    let execs = ranks.iter_mut().map(|(exec, _)| exec).collect();
    let load = |loader: &mut Loader<'_>, rank: usize| {
        let weights = M::weights(loader, &configs[rank])?;
        let unused: Vec<String> = loader.unused().into_iter().map(str::to_owned).collect();
        Ok((weights, (unused, loader.rounded())))
    };
    let loaded = Loader::run_ranks(execs, source, progress, load)?;
    let (weights, reads): (Vec<_>, Vec<_>) = loaded.into_iter().unzip();
    if let Some(((unused, rounded), others)) = reads.split_first() {
        // The names are sorted.
        let used =
            |name: &str| others.iter().any(|(unused, _)| unused.binary_search_by(|n| n.as_str().cmp(name)).is_err());
        let unused: Vec<&str> = unused.iter().map(String::as_str).filter(|name| !used(name)).collect();
        log_unused::<M>(&unused);
        log_rounded(*rounded);
    }
    Ok(weights)
}

/// Loads the weights of a rank with these numbers; on return, all are on the device. `progress` is called with the size
/// in bytes of each loaded chunk.
pub fn load_weights<M: Model>(
    exec: &mut Exec,
    config: &M::Config,
    source: &Source,
    progress: &mut (dyn FnMut(u64) + Send),
) -> Result<M::Weights, WeightsError> {
    Loader::run(exec, source, progress, |loader| {
        let weights = M::weights(loader, config)?;
        log_unused::<M>(&loader.unused());
        log_rounded(loader.rounded());
        Ok(weights)
    })
}

/// Logs unused tensors of the checkpoint: those that the engine skips, and unknown ones, for example of layers beyond
/// those in config.json.
fn log_unused<M: Model>(unused: &[&str]) {
    let (mut skipped, mut unknown) = (BTreeMap::<_, usize>::new(), Vec::new());
    for name in unused {
        // Some checkpoints store a copy of the embedding; a different output matrix would be loaded.
        let repeated = (*name == HEAD).then_some("an output matrix that repeats the embedding");
        let scales = SCALES.iter().any(|suffix| name.ends_with(suffix)).then_some("scales of activations and KV");
        match M::skipped(name).or(repeated).or(scales) {
            Some(purpose) => *skipped.entry(purpose).or_default() += 1,
            None => unknown.push(*name),
        }
    }
    for (purpose, tensors) in skipped {
        log::info!("{tensors} tensors of {purpose} are not loaded");
    }
    if let (Some(first), more) = (unknown.first(), unknown.len().saturating_sub(1)) {
        log::warn!(
            "config.json does not ask for {first} and {more} more tensors of the checkpoint, which are not used; does it belong to \
             these weights?"
        );
    }
}

/// Logs that tensors were rounded.
fn log_rounded(tensors: usize) {
    if tensors > 0 {
        log::info!(
            "{tensors} tensors of the checkpoint are stored as F32 or F16 and rounded to bf16 while they are loaded"
        );
    }
}

/// An id beyond the vocabulary would never end a text.
fn check_eos(info: &ModelInfo) -> Result<(), LoadError> {
    match info.eos_token_ids.iter().find(|id| **id as usize >= info.vocab_size) {
        None => Ok(()),
        Some(id) => Err(LoadError::Eos { id: *id, vocab_size: info.vocab_size }),
    }
}
