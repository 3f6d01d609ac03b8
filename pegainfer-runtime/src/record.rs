//! The kernel plan of a step, without weights or memory.

use super::bounds::{Bounds, StepSize};
use super::executor::Executor;
use super::load::load_weights;
use super::load_error::LoadError;
use super::model::{Model, StepOf, shard_config, uniform};
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::Shard;
use pegainfer_core::record::OpRecord;
use pegainfer_core::weights::Source;
use pegainfer_kernels::ops;

/// The ops of one step on rank 0 of `ranks`: `batch` rows that each add `tokens` tokens to a context of `context` tokens
/// in all, and sample. Exchanges are those of GPUs with peer access.
pub fn record<M: Model>(
    config: &M::Config,
    ranks: usize,
    (batch, tokens, context): (usize, usize, usize),
) -> Result<Vec<OpRecord>, LoadError> {
    record_step::<M>(config, ranks, &uniform::<M>(batch, tokens, context))
}

/// The ops of `step`, whose blocks and state slots are numbered consecutively, on rank 0 of `ranks`.
pub fn record_step<M: Model>(config: &M::Config, ranks: usize, step: &StepOf<M>) -> Result<Vec<OpRecord>, LoadError> {
    let mut exec = Exec::meta()?;
    let source = Source::Dummy { seed: 0, std: 0.0, uniform: ops::uniform };
    let shard = Shard { rank: 0, ranks };
    let weights = load_weights::<M>(&mut exec, &shard_config::<M>(config, shard)?, &source, &mut |_| {})?;
    let (tokens, rows) = (step.tokens.len(), step.rows.len());
    let context = step.kv_lens.iter().copied().max().unwrap_or(0) as usize;
    let bounds = Bounds::exact(StepSize { tokens, rows, samples: rows, context }, rows * step.max_blocks());
    let mut executor = Executor::<M>::new(config.clone(), vec![(exec, shard, weights)], &bounds)?;
    let (result, records) = executor.record(step);
    result?;
    Ok(records)
}
