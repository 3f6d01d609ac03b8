//! Compares all ranks bit for bit after a step. For development: reads back everything that is compared.

use super::rank::Rank;
use crate::model::{Model, StepOf};
use crate::tensor_hash::hash_words;
use pegainfer_core::parallel::Ranks;
use pegainfer_core::tensor::OpError;
use std::sync::{Mutex, PoisonError};

/// Compares the tokens that `step` drew, then what [`Model::hashes`] names. The error names the first difference.
pub(super) fn same_on_all_ranks<M: Model>(ranks: &mut Ranks<Rank<M>>, step: &StepOf<M>) -> Result<(), OpError> {
    let found = Mutex::new(vec![Vec::new(); ranks.count()]);
    ranks.run(|rank| {
        let mut drawn = vec![0u32; step.samples.len()];
        rank.exec.read(&rank.sampler.sampled, 0, &mut drawn)?;
        let mut hashes = vec![("the tokens".to_owned(), hash_words(0, drawn))];
        hashes.extend(rank.hashes(step)?);
        found.lock().unwrap_or_else(PoisonError::into_inner)[rank.shard.rank] = hashes;
        Ok(())
    })?;
    let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (rank, hashes) in found.iter().enumerate() {
        if let Some(((what, _), _)) = hashes.iter().zip(&found[0]).find(|(own, first)| own != first) {
            let message = format!("rank {rank} and rank 0 differ in {what}");
            return Err(OpError { op: "check_ranks", message });
        }
    }
    Ok(())
}
