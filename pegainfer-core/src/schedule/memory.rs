//! What a model remembers of a sequence beside its KV blocks.

use crate::kv::BlockTable;
use std::fmt::Debug;
use std::ops::Range;
use thiserror::Error;

/// Nothing is left to remember more tokens in, until a step is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the model's memory is full")]
pub struct OutOfMemory;

/// The bookkeeping of a model's own state, such as that of recurrent layers: the scheduler moves it with the KV blocks. Pure;
/// the bytes live in the model's `state.rs`. A model that keeps all of its state in KV blocks has `()`.
///
/// A step is reserved for each of its sequences first, then planned for each, and committed when it is done; a reserved
/// step that is not planned is reserved again. What a dropped [`Held`](Self::Held) held is free.
pub trait Memory: Debug + Send + 'static {
    /// What is kept for one sequence; the default is that of one without tokens.
    type Held: Debug + Default + Send + 'static;
    /// What a step tells the executor about it.
    type Row: Debug + Clone + Default + PartialEq + Send + 'static;

    /// Goes on from the longest prefix that is remembered, of at most `cached` tokens, whose KV is in the full blocks of
    /// `table`: cuts the table to it and returns its length in tokens.
    fn resume(&mut self, held: &mut Self::Held, table: &mut BlockTable, cached: usize) -> usize;

    /// Takes what the tokens at the positions `tokens` need, of a sequence with a prompt of `prompt_len` tokens.
    fn reserve(&mut self, held: &mut Self::Held, prompt_len: usize, tokens: Range<usize>) -> Result<(), OutOfMemory>;

    /// Adds the rows of what was reserved for `tokens`, the first of which is token `first` of the step.
    fn plan(&mut self, held: &mut Self::Held, tokens: Range<usize>, first: u32, rows: &mut Vec<Self::Row>);

    /// The first `computed` tokens of the sequence are computed and known, and their full blocks are in the index.
    fn commit(&mut self, held: &mut Self::Held, table: &BlockTable, computed: usize);

    /// Forgets every prefix that no sequence holds.
    fn forget_prefixes(&mut self);
}

impl Memory for () {
    type Held = ();
    type Row = ();

    fn resume(&mut self, (): &mut (), _table: &mut BlockTable, cached: usize) -> usize {
        cached
    }

    fn reserve(&mut self, (): &mut (), _prompt_len: usize, _tokens: Range<usize>) -> Result<(), OutOfMemory> {
        Ok(())
    }

    fn plan(&mut self, (): &mut (), _tokens: Range<usize>, _first: u32, _rows: &mut Vec<()>) {}

    fn commit(&mut self, (): &mut (), _table: &BlockTable, _computed: usize) {}

    fn forget_prefixes(&mut self) {}
}
