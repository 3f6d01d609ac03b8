//! From a checkpoint to an engine that is ready for its thread.

use super::bounds::Bounds;
use super::executor::Executor;
use super::load_error::LoadError;
use super::load_options::LoadOptions;
use super::model::{Model, ragged, uniform};
use crate::choice;
use crate::heads::BLOCK_SIZE;
use crate::ops;
use pegainfer_core::engine::EngineLimits;
use pegainfer_core::exec::Exec;
use pegainfer_core::schedule::{EngineCore, TokenBudget};
use pegainfer_core::weights::{Loader, Source, WeightsError};
use std::time::{Duration, Instant};

/// The engine of a model.
pub type Engine<M> = EngineCore<Executor<M>>;

/// A loaded engine, ready for its thread, and what start-up prints about it.
#[derive(Debug)]
pub struct Loaded<M: Model> {
    /// The engine.
    pub engine: Engine<M>,
    /// The model's numbers.
    pub config: M::Config,
    /// From the first weight to the last, on the device.
    pub weights_time: Duration,
}

/// Loads a checkpoint onto `exec`, with a pass through the model: what it cannot run is refused here, not when it serves.
/// `progress` is called with (bytes of this chunk, bytes of all weights).
pub fn load<M: Model>(
    mut exec: Exec,
    options: &LoadOptions,
    progress: &mut (dyn FnMut(u64, u64) + Send),
) -> Result<Loaded<M>, LoadError> {
    let config = M::load_config(&options.model_path)?;
    let info = M::info(&config);
    let bounds = Bounds::new(&info, options, &mut exec)?;
    let source = match options.dummy_seed {
        Some(seed) => Source::Dummy { seed, std: info.initializer_range, uniform: ops::uniform },
        None => Source::open(&options.model_path)?,
    };
    let start = Instant::now();
    let progress = &mut |bytes| progress(bytes, info.weight_bytes);
    let weights = load_weights::<M>(&mut exec, &config, &source, progress)?;
    exec.synchronize()?;
    let weights_time = start.elapsed();
    let mut executor = Executor::<M>::new(exec, config.clone(), weights, &bounds)?;
    warm(&mut executor, &bounds, options.max_num_mixed_tokens)?;
    let limits = EngineLimits {
        max_model_len: bounds.size.context,
        vocab_size: info.vocab_size,
        block_size: BLOCK_SIZE,
        kv_blocks: executor.kv_blocks(),
        max_num_seqs: bounds.size.rows,
        eos_token_ids: info.eos_token_ids,
        unsupported: &[],
    };
    let tokens = TokenBudget { step: bounds.size.tokens, mixed: options.max_num_mixed_tokens };
    let state = M::state(&config, &bounds);
    Ok(Loaded { engine: Engine::<M>::new(executor, limits, tokens, state), config, weights_time })
}

/// Loads the weights of a model: when this returns, all of them are on the device. `progress` is called with the bytes of
/// each chunk as it is loaded.
pub fn load_weights<M: Model>(
    exec: &mut Exec,
    config: &M::Config,
    source: &Source,
    progress: &mut (dyn FnMut(u64) + Send),
) -> Result<M::Weights, WeightsError> {
    M::log_skipped(source);
    Loader::run(exec, source, progress, |loader| M::weights(loader, config))
}

/// One token through the model, whose first pages are touched before the first request would wait for them; and on a GPU
/// the steps that load kernels and let cuBLASLt choose.
fn warm<M: Model>(executor: &mut Executor<M>, bounds: &Bounds, mixed_tokens: usize) -> Result<(), LoadError> {
    executor.run(&uniform::<M>(1, 1, 1))?;
    let (blocks, size) = (executor.kv_blocks(), bounds.size);
    let most = (size.rows.min(blocks), size.tokens.min(size.context).min(blocks * BLOCK_SIZE));
    for rows in choice::warm_up(executor.exec(), mixed_tokens, most)? {
        executor.run(&ragged::<M>(&rows))?;
    }
    Ok(())
}
