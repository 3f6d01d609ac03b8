//! State of a sequence other than its KV blocks.

use super::speculation::DraftState;
use crate::kv::BlockTable;
use crate::kv::tiers::KeptState;
use serde::{Deserialize, Serialize};
use std::fmt::Debug;
use std::hash::Hash;
use std::ops::Range;
use thiserror::Error;

/// Number of state slots, and the rule for keeping snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateConfig {
    /// Maximum number of running sequences, each with a slot.
    #[serde(default)]
    pub sequences: usize,
    /// Additional slots for snapshots.
    pub snapshots: usize,
    /// Tokens between snapshots, a multiple of `block_tokens`. 0 keeps none, so prefixes are never found.
    pub interval: usize,
    /// Tokens of a KV block.
    #[serde(default)]
    pub block_tokens: usize,
    /// True if a step can leave snapshots in the middle of a chunk. If false, a chunk that crosses a multiple of
    /// `interval` ends at the last one it reaches, and only ends of chunks are kept. A slot of such a model has an
    /// address for each of the newest tokens, drafts included; later tokens overwrite those of refused drafts.
    pub within_chunks: bool,
}

/// Error: no state slot is free until a step is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the model is out of state slots")]
pub struct OutOfSlots;

/// Bookkeeping of a model's own state, such as that of recurrent layers; the scheduler manages it together with KV
/// blocks. Pure; the bytes live in the model's `state.rs`. A model that keeps all of its state in KV blocks uses `()`.
///
/// A step is reserved for each of its sequences, then planned for each, and committed when it is done. A reserved step
/// that is not planned is reserved again. Dropping a [`Slot`](Self::Slot) frees what it held.
pub trait SequenceState: Debug + Send + 'static {
    /// State slots of one sequence; the default belongs to a sequence without tokens.
    type Slot: Debug + Default + Send + 'static;
    /// A kept state, which stays as it is while this value lives. Only models with state outside of KV blocks have
    /// some.
    type Kept: KeptState;
    /// Description of the slots that a step passes to the executor.
    type Row: Debug + Clone + Default + PartialEq + Hash + Send + Sync + 'static;

    /// The slots of a model that has some, to build the same state in a simulation.
    fn slots(&self) -> Option<StateConfig> {
        None
    }

    /// End of a chunk that starts at position `computed` and may end at `end` at the latest, in `computed + 1..=end`.
    /// Default: `end`.
    fn chunk_end(&self, computed: usize, end: usize) -> usize {
        let _ = computed;
        end
    }

    /// Resumes from the longest prefix with a kept state, up to `cached` tokens, whose KV is in the full blocks of
    /// `table`. Cuts the table to that prefix and returns its length in tokens.
    fn resume(&mut self, slot: &mut Self::Slot, table: &mut BlockTable, cached: usize) -> usize;

    /// Reserves slots for the tokens at positions `tokens` of a sequence with a prompt of `prompt_len` tokens.
    fn reserve(&mut self, slot: &mut Self::Slot, prompt_len: usize, tokens: Range<usize>) -> Result<(), OutOfSlots>;

    /// Treatment of the state after draft tokens.
    fn drafts(&self) -> DraftState;

    /// Maximum number of drafts that a step may verify after a chunk that ends at position `end`. Default: unlimited.
    fn max_drafts(&self, end: usize) -> usize {
        let _ = end;
        usize::MAX
    }

    /// Appends the rows reserved for `tokens`, which start at token `first` of the step, and for `drafts` draft tokens
    /// after them.
    fn plan(&mut self, slot: &mut Self::Slot, tokens: Range<usize>, drafts: u32, first: u32, rows: &mut Vec<Self::Row>);

    /// Called after the first `computed` tokens of the sequence are computed and known, and their full blocks are in
    /// the index.
    fn commit(&mut self, slot: &mut Self::Slot, table: &BlockTable, computed: usize);

    /// Removes every prefix that no sequence holds.
    fn forget_prefixes(&mut self);

    /// Length of the prefix that [`resume`](Self::resume) would resume from.
    fn usable(&self, table: &BlockTable, cached: usize) -> usize;

    /// Lists kept states for [`take_new`](Self::take_new) from now on.
    fn list_new(&mut self) {}

    /// The states that the last [`commit`](Self::commit) kept, each with the number of its tokens, if they are listed.
    fn take_new(&mut self) -> Vec<(usize, Self::Kept)> {
        Vec::new()
    }

    /// A slot for a state that comes from outside the device.
    fn allocate(&self) -> Option<Self::Kept> {
        None
    }

    /// Keeps a state as that after the first `tokens` tokens of `table`, whose blocks are in the index.
    fn keep(&mut self, table: &BlockTable, tokens: usize, state: Self::Kept) {
        let _ = (table, tokens, state);
    }
}

impl SequenceState for () {
    type Slot = ();
    type Kept = ();
    type Row = ();

    fn resume(&mut self, (): &mut (), _table: &mut BlockTable, cached: usize) -> usize {
        cached
    }

    fn reserve(&mut self, (): &mut (), _prompt_len: usize, _tokens: Range<usize>) -> Result<(), OutOfSlots> {
        Ok(())
    }

    fn drafts(&self) -> DraftState {
        DraftState::Kept
    }

    fn plan(&mut self, (): &mut (), _tokens: Range<usize>, _drafts: u32, _first: u32, _rows: &mut Vec<()>) {}

    fn commit(&mut self, (): &mut (), _table: &BlockTable, _computed: usize) {}

    fn forget_prefixes(&mut self) {}

    fn usable(&self, _table: &BlockTable, cached: usize) -> usize {
        cached
    }
}
