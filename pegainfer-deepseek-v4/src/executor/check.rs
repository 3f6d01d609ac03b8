//! Compares tokens and state of all ranks bit for bit after a step. For development: reads back everything that the
//! step wrote.

use super::rank::Rank;
use crate::plan::{NO_STATE, PAGE_TOKENS, Step};
use crate::state::LayerState;
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::Ranks;
use pegainfer_core::rng::mix;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::sync::{Arc, Mutex, PoisonError};

/// Compares the tokens that `step` drew and, layer by layer, the state in its slots and in the newest page of each of
/// its rows. The last state is that of the layer that drafts, if it is loaded, before its passes after `step`. The
/// error names the first difference.
pub(super) fn same_on_all_ranks(ranks: &mut Ranks<Rank>, step: &Step) -> Result<(), OpError> {
    let (found, step) = (Arc::new(Mutex::new(Vec::new())), Arc::new(step.clone()));
    let all = found.clone();
    ranks.run(move |rank| {
        let hashes = rank.hashes(&step)?;
        all.lock().unwrap_or_else(PoisonError::into_inner).push((rank.shard.rank, hashes));
        Ok(())
    })?;
    let mut found = std::mem::take(&mut *found.lock().unwrap_or_else(PoisonError::into_inner));
    found.sort_unstable_by_key(|(rank, _)| *rank);
    let Some(((_, expected), others)) = found.split_first() else { return Ok(()) };
    for (rank, hashes) in others {
        if let Some(i) = hashes.iter().zip(expected).position(|(a, b)| a != b) {
            let what = if i == 0 { "the tokens".to_owned() } else { format!("the state of layer {}", i - 1) };
            let message = format!("rank {rank} and rank 0 differ in {what}");
            return Err(OpError { op: "check_ranks", message });
        }
    }
    Ok(())
}

impl Rank {
    /// Hash of the tokens that `step` drew, then one of the state of each layer.
    fn hashes(&self, step: &Step) -> Result<Vec<u64>, OpError> {
        let mut drawn = vec![0u32; step.samples.len()];
        self.exec.read(&self.sampler.sampled, 0, &mut drawn)?;
        let tokens = drawn.iter().fold(0, |hash, token| mix(hash ^ u64::from(*token)));
        let layers = self.state.iter().map(|layer| layer_hash(&self.exec, layer, step));
        std::iter::once(Ok(tokens)).chain(layers).collect()
    }
}

/// Hash of the state of a layer that belongs to the rows of `step`: their slots, and their newest pages.
fn layer_hash(exec: &Exec, layer: &LayerState, step: &Step) -> Result<u64, OpError> {
    let mut hash = 0;
    let mut add = |tensor: &Tensor, row: u32| -> Result<(), OpError> {
        hash = row_hash(exec, tensor, row as usize, hash)?;
        Ok(())
    };
    for (b, segment) in step.state.iter().enumerate().filter(|(_, segment)| segment.to != NO_STATE) {
        let newest = step.positions[segment.end as usize - 1] as usize / PAGE_TOKENS;
        let page = step.block_tables[b].at(newest);
        add(&layer.window, segment.to)?;
        for compressed in layer.compressed.iter().chain(&layer.index) {
            add(&compressed.partial.values, segment.to)?;
            add(&compressed.partial.scores, segment.to)?;
            add(&compressed.entries, page)?;
        }
    }
    Ok(hash)
}

/// Continues the hash `before` with row `row` of a bf16 or f32 tensor.
fn row_hash(exec: &Exec, tensor: &Tensor, row: usize, before: u64) -> Result<u64, OpError> {
    let width = tensor.rows_cols().1;
    let fold = |hash: u64, bits: u32| mix(hash ^ u64::from(bits));
    if tensor.dtype() == DType::F32 {
        let mut values = vec![0f32; width];
        exec.read(tensor, row * width, &mut values)?;
        return Ok(values.iter().map(|v| v.to_bits()).fold(before, fold));
    }
    let mut values = vec![half::bf16::ZERO; width];
    exec.read(tensor, row * width, &mut values)?;
    Ok(values.iter().map(|v| u32::from(v.to_bits())).fold(before, fold))
}
