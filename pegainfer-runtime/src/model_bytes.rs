//! Memory that a model needs on a device, computed by running its own functions on `Device::Meta`.

use super::bounds::{Bounds, StepSize};
use super::load_error::LoadError;
use super::model::{Model, Parts};
use super::model_info::ModelBytes;
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::Shard;
use pegainfer_core::weights::{Loader, Source};
use pegainfer_kernels::ops;

/// Tokens of the smaller of two steps whose workspaces give the memory per token.
const TOKENS: usize = 1024;

impl ModelBytes {
    /// Memory of a rank with these numbers. Allocates nothing.
    pub fn of<M: Model>(config: &M::Config) -> Result<Self, LoadError> {
        Self::with_drafts::<M>(config, 0)
    }

    /// [`of`](Self::of) a rank whose steps verify `drafts` drafts of a row.
    pub fn with_drafts<M: Model>(config: &M::Config, drafts: usize) -> Result<Self, LoadError> {
        let mut exec = Exec::meta()?;
        let source = Source::Dummy { seed: 0, std: 0.0, uniform: ops::uniform, random_bytes: ops::random_bytes };
        let mut loaded = Loader::run(&mut exec, &source, &mut |_| {}, |loader| M::weights(loader, config))?;
        let weights = exec.allocated_bytes();
        M::finish_weights(&mut exec, &mut loaded, config)?;
        let derived = exec.allocated_bytes() - weights;
        let bounds = |tokens: usize, slots: usize| {
            let size = StepSize { tokens, rows: 1, samples: 1, context: 1 };
            // No snapshots, so that tokens are never split into segments.
            Bounds { slots, drafts, snapshot_interval: usize::MAX, ..Bounds::exact(size, 1) }
        };
        let mut workspace = |tokens: usize| {
            let before = exec.allocated_bytes();
            let work = M::workspace(&mut exec, config, &bounds(tokens, 1))?;
            Ok::<_, LoadError>((work, exec.allocated_bytes() - before))
        };
        let ((work, small), (_, large)) = (workspace(TOKENS)?, workspace(2 * TOKENS)?);
        let mut cache = |blocks: usize, slots: usize| {
            let before = exec.allocated_bytes();
            let parts = Parts { exec: &mut exec, config, weights: &loaded, work: &work, shard: Shard::WHOLE };
            M::cache(parts, &bounds(TOKENS, slots), blocks)?;
            Ok::<_, LoadError>(exec.allocated_bytes() - before)
        };
        let one = cache(1, 1)?;
        Ok(Self {
            weights,
            derived,
            workspace_per_token: (large - small) / TOKENS as u64,
            kv_per_token: (cache(2, 1)? - one) / M::BLOCK_TOKENS as u64,
            state_slot: cache(1, 2)? - one,
            block_tokens: M::BLOCK_TOKENS,
        })
    }
}
