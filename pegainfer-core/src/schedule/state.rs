//! What a model keeps of a sequence besides its KV blocks.

use super::speculation::DraftState;
use crate::kv::BlockTable;
use serde::{Deserialize, Serialize};
use std::fmt::Debug;
use std::hash::Hash;
use std::ops::Range;
use thiserror::Error;

/// How many slots a model has, and which states are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateConfig {
    /// Sequences that may run, each with a slot.
    #[serde(default)]
    pub sequences: usize,
    /// Slots besides these, for snapshots.
    pub snapshots: usize,
    /// Tokens between snapshots, a multiple of `block_tokens`; 0 keeps none, so that no prefix is ever found.
    pub interval: usize,
    /// Tokens of a KV block.
    #[serde(default)]
    pub block_tokens: usize,
    /// Whether a step can leave snapshots in the middle of a chunk. If not, a chunk that reaches a multiple of `interval`
    /// ends at the last one that it reaches, and only ends of chunks are kept. Such a model has in a slot an
    /// address for each of the newest tokens, draft tokens included; what refused drafts have written is overwritten later.
    pub within_chunks: bool,
}

/// No state slot is left until a step is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the model is out of state slots")]
pub struct OutOfSlots;

/// The bookkeeping of a model's own state, such as that of recurrent layers: the scheduler moves it with the KV blocks. Pure;
/// the bytes live in the model's `state.rs`. A model that keeps all of its state in KV blocks has `()`.
///
/// A step is reserved for each of its sequences first, then planned for each, and committed when it is done; a reserved
/// step that is not planned is reserved again. What a dropped [`Slot`](Self::Slot) held is free.
pub trait SequenceState: Debug + Send + 'static {
    /// The state slots of one sequence; the default is that of a sequence without tokens.
    type Slot: Debug + Default + Send + 'static;
    /// What a step tells the executor about them.
    type Row: Debug + Clone + Default + PartialEq + Hash + Send + Sync + 'static;

    /// The slots of a model that has some, to build the same state in a simulation.
    fn slots(&self) -> Option<StateConfig> {
        None
    }

    /// Where a chunk must end that begins at position `computed` and may end at `end` at most: a position in
    /// `computed + 1..=end`. Anywhere, by default.
    fn chunk_end(&self, computed: usize, end: usize) -> usize {
        let _ = computed;
        end
    }

    /// Goes on from the longest prefix whose state is kept, of at most `cached` tokens, whose KV is in the full blocks of
    /// `table`: cuts the table to it and returns its length in tokens.
    fn resume(&mut self, slot: &mut Self::Slot, table: &mut BlockTable, cached: usize) -> usize;

    /// Takes what the tokens at the positions `tokens` need, of a sequence with a prompt of `prompt_len` tokens.
    fn reserve(&mut self, slot: &mut Self::Slot, prompt_len: usize, tokens: Range<usize>) -> Result<(), OutOfSlots>;

    /// What becomes of the state behind draft tokens.
    fn drafts(&self) -> DraftState;

    /// Most draft tokens that a step may verify behind a chunk that ends at position `end`. Unlimited by default.
    fn max_drafts(&self, end: usize) -> usize {
        let _ = end;
        usize::MAX
    }

    /// Adds the rows of what was reserved for `tokens`, the first of which is token `first` of the step, and of `drafts` draft
    /// tokens behind them.
    fn plan(&mut self, slot: &mut Self::Slot, tokens: Range<usize>, drafts: u32, first: u32, rows: &mut Vec<Self::Row>);

    /// The first `computed` tokens of the sequence are computed and known, and their full blocks are in the index.
    fn commit(&mut self, slot: &mut Self::Slot, table: &BlockTable, computed: usize);

    /// Forgets every prefix that no sequence holds.
    fn forget_prefixes(&mut self);
}

impl SequenceState for () {
    type Slot = ();
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
}
