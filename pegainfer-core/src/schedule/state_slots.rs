//! State slots and snapshots: the [`SequenceState`] of models whose state has a fixed size for each sequence.
//!
//! Every running sequence keeps the state after its newest token in a slot. At some block boundaries the state is kept
//! as a snapshot for later requests: at multiples of `interval` tokens, and at the last full block of a prompt. There
//! the sequence leaves its slot as the snapshot and continues in another one. A kernel that reads one slot and writes
//! the other copies nothing; an executor whose kernels update slots in place copies the slot before the step.
//!
//! Snapshots are found by the name of their prefix in the KV pool. A prefix hit is as long as the longest snapshot
//! allows. Slots that neither a sequence nor a snapshot holds are free; the least recently used snapshot is evicted
//! first.
//!
//! If snapshots can be made within chunks, those in the middle of a prompt or of an output from which nobody resumed are
//! evicted before all others: a conversation resumes at the last one of a prompt or of its output. Prompts that only
//! begin alike, such as those with one system prompt, are told by their KV: where a prompt leaves the blocks of
//! another one far behind a snapshot, one is made and not evicted before others.
//!
//! A snapshot never takes a slot that a sequence without one may need, so snapshots do not keep prompts out of a
//! step. A sequence that still gets no slot waits for the next step. That cannot last, because sequences hold at most
//! one slot each between steps, and there is at least one more.

use super::segment::{NO_STATE, Segment};
use super::slot_pool::{SlotPool, SlotRef};
use super::speculation::DraftState;
use super::state::{OutOfSlots, SequenceState, StateConfig};
use crate::kv::BlockTable;
use std::ops::Range;
use std::sync::Arc;

/// The slots of an engine.
#[derive(Debug)]
pub struct StateSlots {
    config: StateConfig,
    pool: SlotPool,
    /// Cloned by every sequence that has a slot, to count them.
    holders: Arc<()>,
    /// Snapshots that the last commit made, with the numbers of their tokens, if they are listed.
    new: Option<Vec<(usize, SlotRef)>>,
}

/// The slots of one sequence.
#[derive(Debug, Default)]
pub struct SequenceSlots {
    /// The state after every planned token; `None` before the first.
    current: Option<SlotRef>,
    /// Present if the sequence has a slot.
    holder: Option<Arc<()>>,
    /// Slots that the reserved tokens write, in order.
    targets: Vec<Target>,
    /// Snapshots that steps in flight make, by the number of tokens.
    pending: Vec<(usize, SlotRef)>,
    /// Number of tokens of its prompt.
    prompt_len: usize,
    /// Where its prompt leaves the blocks of another one, if that is far behind the snapshot it resumes from.
    branch: Option<usize>,
    /// Prefixes of its last snapshots within the prompt and behind it.
    last: [Option<u64>; 2],
}

/// The end of a segment.
#[derive(Debug)]
struct Target {
    /// Position of the token after the segment.
    end: usize,
    slot: SlotRef,
    /// True if the state is kept as a snapshot.
    is_snapshot: bool,
}

impl StateSlots {
    /// Free slots without snapshots.
    pub fn new(config: StateConfig) -> Self {
        assert!(config.interval.is_multiple_of(config.block_tokens), "a snapshot belongs to full blocks");
        Self { config, pool: SlotPool::new(config.sequences + config.snapshots), holders: Arc::new(()), new: None }
    }

    /// Slots of the engine.
    pub fn total(&self) -> usize {
        self.config.sequences + self.config.snapshots
    }

    /// Number of slots that no sequence holds.
    pub fn available(&self) -> usize {
        self.pool.available()
    }

    /// Number of snapshots.
    pub fn snapshots(&self) -> usize {
        self.pool.snapshots()
    }

    /// Checks the bookkeeping; for tests.
    pub fn check(&self) -> Result<(), String> {
        self.pool.check()
    }

    /// True if the state after `tokens` tokens is kept.
    fn keeps(&self, slots: &SequenceSlots, tokens: usize) -> bool {
        let StateConfig { interval, block_tokens, .. } = self.config;
        let end_of_prompt = slots.prompt_len.saturating_sub(1) / block_tokens * block_tokens;
        let is_kept = tokens.is_multiple_of(interval.max(1)) || tokens == end_of_prompt || slots.branch == Some(tokens);
        interval > 0 && tokens > 0 && is_kept
    }

    /// A slot for a snapshot, unless sequences without a slot may need all available ones.
    fn allocate_snapshot(&self) -> Option<SlotRef> {
        let wanted = self.config.sequences.saturating_sub(Arc::strong_count(&self.holders) - 1);
        if self.pool.available() > wanted { self.pool.allocate() } else { None }
    }

    /// The slot that the sequence continues in: its own, if nobody else needs its state, otherwise another one.
    fn next_slot(&self, slots: &mut SequenceSlots) -> Option<SlotRef> {
        let Some(current) = slots.current.clone() else { return self.pool.allocate() };
        // `current` and `slots.current` hold it.
        let (holders, has_snapshot) = current.holders_and_snapshot();
        if holders == 2 && !has_snapshot {
            return Some(current);
        }
        if let Some(slot) = self.pool.allocate() {
            return Some(slot);
        }
        // No slot is left for a snapshot: give this one up, unless another sequence resumes from it.
        let pending = slots.pending.iter().filter(|(_, slot)| slot.id() == current.id()).count();
        if holders > 2 + pending {
            return None;
        }
        slots.pending.retain(|(_, slot)| slot.id() != current.id());
        current.drop_snapshot();
        Some(current)
    }
}

impl SequenceState for StateSlots {
    type Slot = SequenceSlots;
    type Kept = SlotRef;
    type Row = Segment;

    fn slots(&self) -> Option<StateConfig> {
        Some(self.config)
    }

    fn chunk_end(&self, computed: usize, end: usize) -> usize {
        let StateConfig { interval, within_chunks, .. } = self.config;
        if within_chunks || interval == 0 {
            return end;
        }
        let boundary = end / interval * interval;
        if boundary > computed { boundary } else { end }
    }

    fn resume(&mut self, slots: &mut SequenceSlots, table: &mut BlockTable, cached: usize) -> usize {
        let tokens = self.usable(table, cached);
        let StateConfig { interval, block_tokens, within_chunks, .. } = self.config;
        let branch = cached / block_tokens * block_tokens;
        slots.branch = (within_chunks && branch > tokens + interval).then_some(branch);
        slots.current = table.prefix(tokens).and_then(|prefix| self.pool.find(prefix));
        table.truncate(tokens);
        tokens
    }

    fn usable(&self, table: &BlockTable, cached: usize) -> usize {
        let size = self.config.block_tokens;
        let lengths = (1..=cached / size).rev().map(|blocks| blocks * size);
        let mut kept = lengths.filter(|tokens| table.prefix(*tokens).is_some_and(|prefix| self.pool.has(prefix)));
        kept.next().unwrap_or(0)
    }

    fn reserve(
        &mut self,
        slots: &mut SequenceSlots,
        prompt_len: usize,
        tokens: Range<usize>,
    ) -> Result<(), OutOfSlots> {
        slots.targets.clear();
        slots.prompt_len = prompt_len;
        // Before the snapshots, because nothing can run without it.
        let slot = self.next_slot(slots).ok_or(OutOfSlots)?;
        slots.holder.get_or_insert_with(|| self.holders.clone());
        if self.config.within_chunks {
            let size = self.config.block_tokens;
            let boundaries = ((tokens.start / size + 1) * size..tokens.end).step_by(size);
            for end in boundaries.filter(|end| self.keeps(slots, *end)).collect::<Vec<_>>() {
                let Some(slot) = self.allocate_snapshot() else { break };
                slots.targets.push(Target { end, slot, is_snapshot: true });
            }
        }
        let is_snapshot = self.keeps(slots, tokens.end);
        slots.targets.push(Target { end: tokens.end, slot, is_snapshot });
        Ok(())
    }

    /// Kernels that read one slot and write another compute drafts from a slot and write none. Kernels that update a
    /// slot in place keep an address for each token.
    fn drafts(&self) -> DraftState {
        if self.config.within_chunks { DraftState::Recomputed } else { DraftState::Kept }
    }

    /// If only ends of chunks are kept, accepted drafts must not cross a multiple of the interval, where the state
    /// would be missing.
    fn max_drafts(&self, end: usize) -> usize {
        let StateConfig { interval, within_chunks, .. } = self.config;
        if within_chunks || interval == 0 {
            return usize::MAX;
        }
        (end / interval + 1) * interval - 1 - end
    }

    fn plan(
        &mut self,
        slots: &mut SequenceSlots,
        tokens: Range<usize>,
        drafts: u32,
        first: u32,
        rows: &mut Vec<Segment>,
    ) {
        let at = |position: usize| first + (position - tokens.start) as u32;
        let (mut begin, mut from) = (tokens.start, slots.current.as_ref().map_or(NO_STATE, SlotRef::id));
        let kept = if self.drafts() == DraftState::Kept { drafts } else { 0 };
        for Target { end, slot, is_snapshot } in std::mem::take(&mut slots.targets) {
            let draft_tokens = if end == tokens.end { kept } else { 0 };
            rows.push(Segment { first: at(begin), end: at(end) + draft_tokens, from, to: slot.id() });
            (begin, from) = (end, slot.id());
            if is_snapshot {
                slots.pending.push((end, slot.clone()));
            }
            slots.current = Some(slot);
        }
        assert_eq!(begin, tokens.end, "the tokens were not reserved");
        if drafts > kept {
            let first = at(tokens.end);
            rows.push(Segment { first, end: first + drafts, from, to: NO_STATE });
        }
    }

    fn commit(&mut self, slots: &mut SequenceSlots, table: &BlockTable, computed: usize) {
        for (tokens, slot) in slots.pending.extract_if(.., |(tokens, _)| *tokens <= computed) {
            let Some(prefix) = table.prefix(tokens) else { continue };
            self.pool.add_snapshot(prefix, &slot);
            if slots.branch == Some(tokens) {
                self.pool.want(&slot);
            }
            let last = slots.last[usize::from(tokens > slots.prompt_len)].replace(prefix);
            if let Some(last) = last.filter(|last| self.config.within_chunks && *last != prefix) {
                self.pool.supersede(last);
            }
            self.new.iter_mut().for_each(|new| new.push((tokens, slot.clone())));
        }
    }

    fn list_new(&mut self) {
        self.new = Some(Vec::new());
    }

    fn take_new(&mut self) -> Vec<(usize, SlotRef)> {
        self.new.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn allocate(&self) -> Option<SlotRef> {
        self.allocate_snapshot()
    }

    fn keep(&mut self, table: &BlockTable, tokens: usize, state: SlotRef) {
        if let Some(prefix) = table.prefix(tokens) {
            self.pool.add_snapshot(prefix, &state);
        }
    }

    fn forget_prefixes(&mut self) {
        self.pool.clear();
    }
}
