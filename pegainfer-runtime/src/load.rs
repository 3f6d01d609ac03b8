//! Loads a checkpoint into an engine that is ready for its thread.

use super::bounds::Bounds;
use super::config_file::Overrides;
use super::executor::Executor;
use super::load_error::LoadError;
use super::load_options::LoadOptions;
use super::model::{Model, ragged, uniform};
use super::model_info::{ModelBytes, ModelInfo};
use super::output_matrix::HEAD;
use super::synthetic_acceptance::SyntheticAcceptance;
use pegainfer_core::engine::EngineLimits;
use pegainfer_core::exec::Exec;
use pegainfer_core::schedule::speculation::{ModelMethod, Speculation};
use pegainfer_core::schedule::{EngineCore, TokenBudget};
use pegainfer_core::weights::{Loader, Source, WeightsError};
use pegainfer_kernels::choice;
use pegainfer_kernels::ops;
use pegainfer_kernels::ops::BLOCK_SIZE;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The engine of a model.
pub type ModelEngine<M> = EngineCore<Executor<M>>;

/// A loaded engine, ready for its thread, and the facts that start-up prints.
#[derive(Debug)]
pub struct Loaded<M: Model> {
    /// The engine.
    pub engine: ModelEngine<M>,
    /// The model's numbers.
    pub config: M::Config,
    /// Memory that it takes on a device.
    pub bytes: ModelBytes,
    /// Time from the first weight to the last, on the device.
    pub weights_time: Duration,
}

/// Loads a checkpoint onto `exec` and runs a pass through the model, which refuses what it cannot run. `progress` is
/// called with (bytes of this chunk, bytes of all weights).
pub fn load<M: Model>(
    mut exec: Exec,
    options: &LoadOptions,
    progress: &mut (dyn FnMut(u64, u64) + Send),
) -> Result<Loaded<M>, LoadError> {
    let config = M::load_config_with(&options.model_path, &overrides::<M>(options)?)?;
    let (info, bytes) = (M::info(&config), ModelBytes::of::<M>(&config)?);
    check_eos(&info)?;
    let source = match options.dummy_seed {
        Some(seed) => Source::Dummy { seed, std: info.initializer_range, uniform: ops::uniform },
        None => Source::open(&options.model_path)?,
    };
    if let Source::Checkpoint(checkpoint) = &source {
        checkpoint.check_block_scales(info.fp8_weights)?;
        check_drafts(info.drafts, checkpoint.names())?;
    }
    let bounds = Bounds::new(&info, &bytes, options, &mut exec)?;
    let start = Instant::now();
    let progress = &mut |loaded| progress(loaded, bytes.weights);
    let weights = load_weights::<M>(&mut exec, &config, &source, progress)?;
    exec.synchronize()?;
    let weights_time = start.elapsed();
    let mut executor = Executor::<M>::new(exec, config.clone(), weights, &bounds)?;
    warm(&mut executor, &bounds, options.max_num_mixed_tokens)?;
    executor.set_synthetic_acceptance(SyntheticAcceptance::of(options.speculation.as_ref()));
    let limits = EngineLimits {
        max_model_len: bounds.size.context,
        vocab_size: info.vocab_size,
        block_size: BLOCK_SIZE,
        kv_blocks: executor.kv_blocks(),
        kv_cache_dtype: options.overrides.kv_dtype.name(),
        max_num_seqs: bounds.size.rows,
        eos_token_ids: info.eos_token_ids,
        num_speculative_tokens: options.speculation.as_ref().map(|speculation| speculation.num_tokens),
        unsupported: &[],
    };
    if bytes.state_slot > 0 {
        let (slot, rows, snapshots) = (bytes.state_slot as f64 / 1e6, bounds.size.rows, bounds.snapshots());
        log::info!(
            "recurrent state: {slot:.1} MB for each of up to {rows} requests, and {snapshots} snapshots in the prefix \
             cache"
        );
    }
    let tokens = TokenBudget { step: bounds.size.tokens, mixed: options.max_num_mixed_tokens };
    let state = M::state(&config, &bounds);
    Ok(Loaded {
        engine: ModelEngine::<M>::new(executor, limits, tokens, state, options.speculation.clone()),
        config,
        bytes,
        weights_time,
    })
}

/// Loads the weights of a model; on return, all are on the device. `progress` is called with the size in bytes of each
/// loaded chunk.
pub fn load_weights<M: Model>(
    exec: &mut Exec,
    config: &M::Config,
    source: &Source,
    progress: &mut (dyn FnMut(u64) + Send),
) -> Result<M::Weights, WeightsError> {
    Loader::run(exec, source, progress, |loader| {
        let weights = M::weights(loader, config)?;
        log_unused::<M>(&loader.unused());
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
        match M::skipped(name).or(repeated) {
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

/// Changes of config.json by the flags.
fn overrides<M: Model>(options: &LoadOptions) -> Result<Overrides, LoadError> {
    let method = Speculation::model_method(options.speculation.as_ref());
    let mtp = method == Some(ModelMethod::Mtp);
    let refused = |name: &str| {
        let message = "has no layers that draft for";
        LoadError::Option(format!(
            "--speculative-config: {} {message} \"method\": \"{name}\"; choose \"ngram\" or \"suffix\"",
            M::NAME
        ))
    };
    match method {
        Some(ModelMethod::DSpark) => return Err(refused("dspark")),
        Some(ModelMethod::Mtp) if !M::DRAFTS => return Err(refused("mtp")),
        _ => {}
    }
    Ok(Overrides { mtp, ..options.overrides.clone() })
}

/// Checks that the layers that draft are there; some conversion tools drop them.
fn check_drafts<'a>(drafts: bool, mut names: impl Iterator<Item = &'a str>) -> Result<(), LoadError> {
    if drafts && !names.any(|name| name.starts_with("mtp.layers.")) {
        return Err(LoadError::Option(
            "--speculative-config: the checkpoint has no mtp.layers.* tensors for \"method\": \"mtp\"; choose \"ngram\" or \"suffix\", or a \
             checkpoint with them"
                .to_owned(),
        ));
    }
    Ok(())
}

/// An id beyond the vocabulary would never end a text.
fn check_eos(info: &ModelInfo) -> Result<(), LoadError> {
    match info.eos_token_ids.iter().find(|id| **id as usize >= info.vocab_size) {
        None => Ok(()),
        Some(id) => Err(LoadError::Eos { id: *id, vocab_size: info.vocab_size }),
    }
}

/// Runs one token through the model, which checks that weights are finite and touches memory before the first request.
/// On a GPU, also runs the steps that load kernels and autotune cuBLASLt, and captures CUDA graphs.
fn warm<M: Model>(executor: &mut Executor<M>, bounds: &Bounds, mixed_tokens: usize) -> Result<(), LoadError> {
    executor.run(&uniform::<M>(1, 1, 1))?;
    if !executor.logits(1)?.iter().all(|logit| logit.is_finite()) {
        return Err(LoadError::NotFinite);
    }
    let (blocks, size) = (executor.kv_blocks(), bounds.size);
    let largest = (size.rows.min(blocks), size.tokens.min(size.context).min(blocks * BLOCK_SIZE));
    for rows in choice::warm_up(executor.exec(), mixed_tokens, largest)? {
        executor.run(&ragged::<M>(&rows))?;
    }
    executor.capture_graphs(largest.0)?;
    Ok(())
}
