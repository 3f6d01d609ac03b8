//! The kernel plan of a step, without weights or memory.

use super::bounds::{Bounds, StepSize};
use super::executor::Executor;
use super::load::load_weights;
use super::load_error::LoadError;
use super::model::{Model, StepOf, shard_config, uniform};
use pegainfer_core::exec::{Activations, Exec};
use pegainfer_core::parallel::Shard;
use pegainfer_core::record::OpRecord;
use pegainfer_core::weights::Source;
use pegainfer_kernels::ops;

/// The ops of one step on rank 0 of `ranks`: `batch` rows that each add `tokens` tokens to a context of `context` tokens
/// in all, and sample. Exchanges are those of GPUs with peer access; activations are rounded where a server rounds them
/// by default.
pub fn record<M: Model>(
    config: &M::Config,
    ranks: usize,
    shape: (usize, usize, usize),
) -> Result<Vec<OpRecord>, LoadError> {
    record_with::<M>(config, Activations::Rounded, ranks, shape)
}

/// Like [`record`], with these activations.
pub fn record_with<M: Model>(
    config: &M::Config,
    activations: Activations,
    ranks: usize,
    (batch, tokens, context): (usize, usize, usize),
) -> Result<Vec<OpRecord>, LoadError> {
    record_step::<M>(config, (activations, ranks), &uniform::<M>(batch, tokens, context))
}

/// The ops of `step`, whose blocks and state slots are numbered consecutively, on rank 0 of `ranks`, with these
/// activations. If the model drafts, the passes after the step are omitted.
pub fn record_step<M: Model>(
    config: &M::Config,
    (activations, ranks): (Activations, usize),
    step: &StepOf<M>,
) -> Result<Vec<OpRecord>, LoadError> {
    let drafts = usize::from(M::info(config).drafts);
    let (result, records) = recorder::<M>(config, (activations, ranks), step, drafts)?.record(step);
    result?;
    Ok(records)
}

/// The ops of a pass of the layers that draft blocks over `blocks` blocks after `context` tokens each, on rank 0 of
/// `ranks`. None for a model that drafts none.
pub fn record_blocks<M: Model>(
    config: &M::Config,
    ranks: usize,
    (blocks, context): (usize, usize),
) -> Result<Vec<OpRecord>, LoadError> {
    let Some(shape) = M::info(config).draft_block else { return Ok(Vec::new()) };
    let largest = uniform::<M>(blocks, shape.tokens, context.max(shape.tokens));
    let mut executor = recorder::<M>(config, (Activations::Rounded, ranks), &largest, shape.tokens)?;
    let mut step = uniform::<M>(blocks, 1, context.max(shape.tokens));
    step.rows.iter_mut().for_each(|row| row.model_drafts = shape.tokens);
    let (result, records) = executor.record_drafts(&step);
    result?;
    Ok(records)
}

/// Rank 0 of `ranks` without memory, for steps as large as `step` that verify `drafts` drafts of each row.
fn recorder<M: Model>(
    config: &M::Config,
    (activations, ranks): (Activations, usize),
    step: &StepOf<M>,
    drafts: usize,
) -> Result<Executor<M>, LoadError> {
    let mut exec = Exec::meta()?;
    exec.set_activations(activations);
    let source = Source::Dummy { seed: 0, std: 0.0, uniform: ops::uniform, random_bytes: ops::random_bytes };
    let shard = Shard { rank: 0, ranks };
    let weights = load_weights::<M>(&mut exec, &shard_config::<M>(config, shard)?, &source, &mut |_| {})?;
    let (tokens, rows) = (step.tokens.len(), step.rows.len());
    let context = step.kv_lens.iter().copied().max().unwrap_or(0) as usize;
    let size = StepSize { tokens, rows, samples: rows * drafts.max(1), context };
    let bounds = Bounds { drafts, ..Bounds::exact(size, rows * step.max_blocks()) };
    Executor::<M>::new(config.clone(), vec![(exec, shard, weights)], &bounds)
}
