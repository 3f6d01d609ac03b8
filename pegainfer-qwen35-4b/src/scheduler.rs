//! Which slot holds the recurrent state of which tokens: what Qwen3.5 adds to the scheduler of pegainfer-core.
//!
//! Every running sequence has the state after its newest token in a slot, and updates it in place. At some block
//! boundaries the state is worth keeping, because later requests may go on from there: at every `interval` tokens, and
//! where the last full block of a prompt ends. There the sequence leaves its slot behind as a copy and goes on in another,
//! so that nothing is copied but by the kernels that read the one and write the other. A prefill does not stop at such a
//! boundary; its step has a segment more.
//!
//! Copies are found by the name of their prefix in the KV pool, and a prefix hit is as long as the longest copy allows.
//! Slots that neither a sequence nor a copy holds are free; the least recently used copy goes first. No copy takes a slot
//! that a sequence may want which has none yet, so that copies do not keep prompts out of a step. A sequence that gets no
//! slot all the same waits for the next step. That cannot last: sequences hold at most a slot each between steps, and
//! there is at least one more.

use crate::plan::{NO_STATE, Segment};
use pegainfer_core::kv::BlockTable;
use pegainfer_core::schedule::{OutOfSlots, SequenceState};
use pegainfer_kernels::ops::BLOCK_SIZE;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// A hold on a slot; it is free when the last one is dropped.
#[derive(Debug)]
struct Slot {
    id: u32,
    free: Arc<Mutex<Vec<u32>>>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        // A poisoned lock only says that another thread panicked; the list is whole.
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.id);
    }
}

/// The state after a prefix.
#[derive(Debug)]
struct Copy {
    slot: Arc<Slot>,
    /// When it was last found or made.
    used: u64,
}

/// The slots of an engine.
#[derive(Debug)]
pub struct StateSlots {
    free: Arc<Mutex<Vec<u32>>>,
    total: usize,
    /// Sequences that may run.
    rows: usize,
    /// Held once more by every sequence that has a slot.
    seats: Arc<()>,
    /// Tokens between copies; 0 keeps none.
    interval: usize,
    /// By `BlockTable::prefix`.
    copies: HashMap<u64, Copy>,
    clock: u64,
}

/// The slots of one sequence.
#[derive(Debug, Default)]
pub struct Held {
    /// The state after every planned token; `None` before the first.
    current: Option<Arc<Slot>>,
    /// That the sequence has a slot.
    seat: Option<Arc<()>>,
    /// Where the tokens that are reserved leave their state, in order.
    targets: Vec<Target>,
    /// Copies that steps in flight make, by the number of tokens.
    pending: Vec<(usize, Arc<Slot>)>,
}

/// The end of a segment.
#[derive(Debug)]
struct Target {
    /// Position of the token after the segment.
    end: usize,
    slot: Arc<Slot>,
    /// Whether it is to be kept.
    is_copy: bool,
}

impl StateSlots {
    /// Free slots: one for each of `rows` sequences that may run, and `copies` more. `interval`: tokens between copies, a
    /// multiple of [`BLOCK_SIZE`]; 0 keeps none, so that no prefix is ever found.
    pub fn new(rows: usize, copies: usize, interval: usize) -> Self {
        assert!(interval.is_multiple_of(BLOCK_SIZE), "a copy belongs to full blocks");
        // Popped from the end: hand out low ids first.
        let total = rows + copies;
        let free = Arc::new(Mutex::new((0..total as u32).rev().collect()));
        Self { free, total, rows, seats: Arc::new(()), interval, copies: HashMap::new(), clock: 0 }
    }

    /// Copies that are kept now.
    pub fn copies(&self) -> usize {
        self.copies.len()
    }

    /// Slots that neither a sequence nor a copy holds, of how many.
    pub fn free(&self) -> (usize, usize) {
        (self.free.lock().unwrap_or_else(PoisonError::into_inner).len(), self.total)
    }

    /// Whether the state after `tokens` tokens is kept.
    fn keeps(&self, prompt_len: usize, tokens: usize) -> bool {
        let end_of_prompt = prompt_len.saturating_sub(1) / BLOCK_SIZE * BLOCK_SIZE;
        self.interval > 0 && tokens > 0 && (tokens.is_multiple_of(self.interval) || tokens == end_of_prompt)
    }

    /// A slot of which the contents are undefined, if need be that of the least recently used copy.
    fn allocate(&mut self) -> Option<Arc<Slot>> {
        let pop = |free: &Mutex<Vec<u32>>| free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let id = pop(&self.free).or_else(|| {
            let unused = self.copies.iter().filter(|(_, copy)| Arc::strong_count(&copy.slot) == 1);
            let oldest = *unused.min_by_key(|(_, copy)| copy.used)?.0;
            self.copies.remove(&oldest);
            pop(&self.free)
        })?;
        Some(Arc::new(Slot { id, free: self.free.clone() }))
    }

    /// A slot for a copy, unless the sequences without a slot may want all that can be had.
    fn allocate_copy(&mut self) -> Option<Arc<Slot>> {
        let wanted = self.rows.saturating_sub(Arc::strong_count(&self.seats) - 1);
        let free = self.free().0;
        let unused = || self.copies.values().filter(|copy| Arc::strong_count(&copy.slot) == 1).count();
        if free > wanted || free + unused() > wanted { self.allocate() } else { None }
    }

    /// The slot that the sequence goes on in: its own, if nobody else needs what is in it, else another one.
    fn next(&mut self, held: &mut Held) -> Option<Arc<Slot>> {
        let Some(current) = &held.current else { return self.allocate() };
        if Arc::strong_count(current) == 1 {
            return Some(current.clone());
        }
        if let Some(slot) = self.allocate() {
            return Some(slot);
        }
        // No slot for a copy: it is given up, unless another sequence goes on from it.
        let is_it = |slot: &Arc<Slot>| Arc::ptr_eq(slot, current);
        let pending = held.pending.iter().filter(|(_, slot)| is_it(slot)).count();
        let copies = self.copies.values().filter(|copy| is_it(&copy.slot)).count();
        if Arc::strong_count(current) > 1 + pending + copies {
            return None;
        }
        held.pending.retain(|(_, slot)| !is_it(slot));
        self.copies.retain(|_, copy| !is_it(&copy.slot));
        Some(current.clone())
    }
}

impl SequenceState for StateSlots {
    type Slot = Held;
    type Row = Segment;

    fn resume(&mut self, held: &mut Held, table: &mut BlockTable, cached: usize) -> usize {
        let mut tokens = cached / BLOCK_SIZE * BLOCK_SIZE;
        while tokens > 0 {
            if let Some(copy) = table.prefix(tokens).and_then(|prefix| self.copies.get_mut(&prefix)) {
                self.clock += 1;
                copy.used = self.clock;
                held.current = Some(copy.slot.clone());
                break;
            }
            tokens -= BLOCK_SIZE;
        }
        table.truncate(tokens);
        tokens
    }

    fn reserve(&mut self, held: &mut Held, prompt_len: usize, tokens: Range<usize>) -> Result<(), OutOfSlots> {
        held.targets.clear();
        // Before the copies: without it nothing can run.
        let slot = self.next(held).ok_or(OutOfSlots)?;
        held.seat.get_or_insert_with(|| self.seats.clone());
        let first = (tokens.start / BLOCK_SIZE + 1) * BLOCK_SIZE;
        for end in
            (first..tokens.end).step_by(BLOCK_SIZE).filter(|end| self.keeps(prompt_len, *end)).collect::<Vec<_>>()
        {
            let Some(slot) = self.allocate_copy() else { break };
            held.targets.push(Target { end, slot, is_copy: true });
        }
        held.targets.push(Target { end: tokens.end, slot, is_copy: self.keeps(prompt_len, tokens.end) });
        Ok(())
    }

    fn plan(&mut self, held: &mut Held, tokens: Range<usize>, first: u32, rows: &mut Vec<Segment>) {
        let at = |position: usize| first + (position - tokens.start) as u32;
        let (mut begin, mut from) = (tokens.start, held.current.as_ref().map_or(NO_STATE, |slot| slot.id));
        for Target { end, slot, is_copy } in std::mem::take(&mut held.targets) {
            rows.push(Segment { first: at(begin), end: at(end), from, to: slot.id });
            (begin, from) = (end, slot.id);
            if is_copy {
                held.pending.push((end, slot.clone()));
            }
            held.current = Some(slot);
        }
        assert_eq!(begin, tokens.end, "the tokens were not reserved");
    }

    fn commit(&mut self, held: &mut Held, table: &BlockTable, computed: usize) {
        for (tokens, slot) in held.pending.extract_if(.., |(tokens, _)| *tokens <= computed) {
            self.clock += 1;
            if let Some(prefix) = table.prefix(tokens) {
                // Where there is one already, it has the same bits.
                self.copies.entry(prefix).or_insert(Copy { slot, used: self.clock }).used = self.clock;
            }
        }
    }

    fn forget_prefixes(&mut self) {
        self.copies.clear();
    }
}
