//! Compares all ranks bit for bit after a step. For development: reads back everything that is compared.

use super::rank::Rank;
use crate::model::{Model, StepOf};
use pegainfer_core::parallel::Ranks;
use pegainfer_core::rng::mix;
use pegainfer_core::tensor::OpError;
use std::sync::{Mutex, PoisonError};

/// Compares the tokens that `step` drew, and the normalised output of the last layer for its samples. The latter is the
/// sum of what all layers added to the residual stream, which every rank holds whole. The error names the first
/// difference.
pub(super) fn same_on_all_ranks<M: Model>(ranks: &mut Ranks<Rank<M>>, step: &StepOf<M>) -> Result<(), OpError> {
    let found = Mutex::new(vec![[0; 2]; ranks.count()]);
    ranks.run(|rank| {
        let hashes = hashes(rank, step.samples.len())?;
        found.lock().unwrap_or_else(PoisonError::into_inner)[rank.shard.rank] = hashes;
        Ok(())
    })?;
    let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (rank, hashes) in found.iter().enumerate() {
        let differs = |i: usize| hashes[i] != found[0][i];
        if let Some(what) = [(0, "the output of the last layer"), (1, "the tokens")].iter().find(|(i, _)| differs(*i)) {
            let message = format!("rank {rank} and rank 0 differ in {}", what.1);
            return Err(OpError { op: "check_ranks", message });
        }
    }
    Ok(())
}

/// Hashes of the output of the last layer and of the tokens of the newest `samples` samples.
fn hashes<M: Model>(rank: &mut Rank<M>, samples: usize) -> Result<[u64; 2], OpError> {
    let hash = |words: &[u32]| words.iter().fold(0, |hash, word| mix(hash ^ u64::from(*word)));
    let mut tokens = vec![0u32; samples];
    rank.exec.read(&rank.sampler.sampled, 0, &mut tokens)?;
    let (exec, normed) = rank.normed();
    let mut values = vec![half::bf16::ZERO; samples.min(normed.rows_cols().0) * normed.rows_cols().1];
    exec.read(normed, 0, &mut values)?;
    let bits: Vec<u32> = values.iter().map(|value| u32::from(value.to_bits())).collect();
    Ok([hash(&bits), hash(&tokens)])
}
