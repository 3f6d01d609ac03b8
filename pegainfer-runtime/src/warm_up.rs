//! The steps that an engine runs before it serves.

use super::bounds::Bounds;
use super::executor::Executor;
use super::load_error::LoadError;
use super::load_options::LoadOptions;
use super::model::{Model, ragged, uniform};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Keys of the engines whose steps a GPU has run: their kernels are loaded and their algorithms chosen.
#[derive(Debug, Default)]
struct WarmEngines(HashSet<String>);

/// Runs one token through the model, which checks that weights are finite and touches memory before the first request.
/// On a GPU, also runs the steps that load kernels and autotune cuBLASLt, unless an equal engine has run them on it
/// since it was opened, and captures CUDA graphs.
pub(super) fn warm_up<M: Model>(
    executor: &mut Executor<M>,
    bounds: &Bounds,
    options: &LoadOptions<M::Options>,
) -> Result<(), LoadError> {
    let begun = Instant::now();
    let seconds = || begun.elapsed().as_secs_f64();
    executor.run(&uniform::<M>(1, 1, 1))?;
    log::debug!("the first step after {:.3} s", seconds());
    if !executor.logits(1)?.iter().all(|logit| logit.is_finite()) {
        return Err(LoadError::NotFinite);
    }
    let (blocks, size, mixed) = (executor.kv_blocks(), bounds.size, options.max_num_mixed_tokens);
    let largest = (size.rows.min(blocks), size.tokens.min(size.context).min(blocks * M::BLOCK_TOKENS));
    // The path tells the formats of weights that the configuration does not.
    let (path, config) = (&options.model_path, executor.config());
    let key = format!("{} {path:?} {config:?} {size:?} {largest:?} {mixed} {:?}", M::NAME, bounds.lora);
    let steps = M::warm_up(executor.exec(), bounds, largest, mixed)?;
    let is_warm = is_warm(executor, &key)?;
    if !steps.is_empty() && !is_warm {
        choose_kernels(executor, &steps, largest.1)?;
        executor.on_each_rank(|exec, _| {
            exec.attached(|_| WarmEngines::default()).0.insert(key.clone());
            Ok(())
        })?;
        log::debug!("{} steps that choose kernels after {:.3} s", steps.len(), seconds());
    }
    executor.capture_graphs(largest.0, bounds.drafts, is_warm)?;
    log::debug!("{} graphs after {:.3} s", executor.captured_graphs(), seconds());
    Ok(())
}

/// True if the devices of all ranks have run the steps of the engine `key`.
fn is_warm<M: Model>(executor: &mut Executor<M>, key: &str) -> Result<bool, LoadError> {
    let is_cold = AtomicBool::new(false);
    executor.on_each_rank(|exec, _| {
        if !exec.attached(|_| WarmEngines::default()).0.contains(key) {
            is_cold.store(true, Ordering::Relaxed);
        }
        Ok(())
    })?;
    Ok(!is_cold.into_inner())
}

/// Runs `steps`, each given as its rows' tokens and contexts. `tokens`: tokens of the largest step.
fn choose_kernels<M: Model>(
    executor: &mut Executor<M>,
    steps: &[Vec<(usize, usize)>],
    tokens: usize,
) -> Result<(), LoadError> {
    executor.on_each_rank(|_, config| {
        M::begin_warm_up(config);
        Ok(())
    })?;
    let mut run = |rows: &Vec<_>| {
        executor.with_adapters(ragged::<M>(rows)).iter().try_for_each(|step| executor.run(step).map(drop))
    };
    let ran = steps.iter().try_for_each(&mut run);
    executor.on_each_rank(|exec, config| M::end_warm_up(exec, config, tokens))?;
    Ok(ran?)
}
