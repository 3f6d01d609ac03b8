//! Kinds of model state other than KV blocks, on the simulated device.

use crate::device::kv_value;
use crate::requests::Rng;
use pegainfer_core::schedule::{NO_STATE, Segment, SequenceState, StateConfig, StateSlots, Step};
use std::collections::HashMap;

/// Scheduler and device of one kind of model.
pub trait Kind: Sized {
    /// Bookkeeping of the state in the scheduler.
    type State: SequenceState;
    /// Tokens of a KV block.
    const BLOCK_TOKENS: usize;
    /// Texts and steps are this many times as long as those of the first kind.
    const SCALE: usize;
    /// The KV pool has fewer blocks than this, and at least two.
    const BLOCKS: usize;
    /// True if the state supports drafts.
    const DRAFTS: bool;
    /// At least one in this many simulated steps preempts.
    const STEPS_PER_PREEMPTION: u64;
    /// True if blocks may have copies outside the device.
    const HAS_TIERS: bool = false;

    /// Unused state for `sequences` sequences, and the slots of the device.
    fn new(rng: &mut Rng, sequences: usize) -> (Self::State, Self);

    /// Runs the states of a step with these `tokens`; `prefixes` are the KV cache's hashes of the prefix up to each of
    /// them.
    fn run(&mut self, step: &StepOf<Self>, tokens: &[u32], prefixes: &[u64]);

    /// The hashes in the state slots, for kinds with tiers.
    fn state_slots(&mut self) -> &mut [u64] {
        &mut []
    }

    /// Checks that every slot is where the bookkeeping says.
    fn check(state: &Self::State);

    /// Checks that no sequence holds a slot.
    fn check_idle(state: &Self::State);
}

/// A step of such a model.
pub type StepOf<K> = Step<<<K as Kind>::State as SequenceState>::Row>;

/// A model with all state in KV blocks.
pub struct KvOnly;

impl Kind for KvOnly {
    type State = ();
    const BLOCK_TOKENS: usize = 16;
    const SCALE: usize = 1;
    const BLOCKS: usize = 22;
    const DRAFTS: bool = true;
    const STEPS_PER_PREEMPTION: u64 = 1000;
    const HAS_TIERS: bool = true;

    fn new(_rng: &mut Rng, _sequences: usize) -> ((), Self) {
        ((), Self)
    }

    fn run(&mut self, _step: &Step, _tokens: &[u32], _prefixes: &[u64]) {}

    fn check((): &()) {}

    fn check_idle((): &()) {}
}

/// The state after the newest token, as kernels keep it that read one slot and write another: a prompt leaves snapshots
/// in the middle of a chunk.
pub struct Recurrent {
    /// The hash of the whole prefix.
    pub slots: Vec<u64>,
}

impl Kind for Recurrent {
    type State = StateSlots;
    const BLOCK_TOKENS: usize = 16;
    const SCALE: usize = 1;
    const BLOCKS: usize = 22;
    const DRAFTS: bool = true;
    const STEPS_PER_PREEMPTION: u64 = 2000;
    const HAS_TIERS: bool = true;

    fn new(rng: &mut Rng, sequences: usize) -> (StateSlots, Self) {
        let snapshots = rng.below(6);
        let interval = if snapshots == 0 { 0 } else { Self::BLOCK_TOKENS * (1 + rng.below(4)) };
        let block_tokens = Self::BLOCK_TOKENS;
        let config = StateConfig { sequences, snapshots, interval, block_tokens, within_chunks: true };
        (StateSlots::new(config), Self { slots: vec![0; sequences + snapshots] })
    }

    fn run(&mut self, step: &Step<Segment>, tokens: &[u32], prefixes: &[u64]) {
        check_cover(step);
        check_chains(&step.state);
        for segment in &step.state {
            let before = if begins(step, segment) { 0 } else { self.slots[segment.from as usize] };
            let after = advance(before, segment, tokens, prefixes);
            if segment.to != NO_STATE {
                self.slots[segment.to as usize] = after;
            }
        }
    }

    fn state_slots(&mut self) -> &mut [u64] {
        &mut self.slots
    }

    fn check(state: &StateSlots) {
        state.check().unwrap();
    }

    fn check_idle(state: &StateSlots) {
        assert_eq!(state.available(), state.total(), "state slots leaked");
    }
}

/// A model whose kernels update state in place, with blocks of 128 tokens. State is copied before a step and can be
/// kept only at the ends of chunks. It has an address for each of the newest tokens, so drafts can be refused.
pub struct InPlace {
    /// For each slot, the token at position `p` at `p % RING`.
    pub slots: Vec<Vec<Kept>>,
}

/// Data of a token in a slot.
#[derive(Debug, Clone, Copy, Default)]
pub struct Kept {
    token: u32,
    /// The hash of the prefix that ends with it.
    pub prefix: u64,
}

/// Number of tokens that a slot keeps.
const WINDOW: usize = 128;
/// The window, and the longest drafts of the tests.
const RING: usize = WINDOW + 6;

impl InPlace {
    /// The state before position `position`, after checking all tokens that the slot keeps.
    fn before(ring: &[Kept], position: usize) -> u64 {
        let at = |p: usize| ring[p % RING];
        for p in position.saturating_sub(WINDOW) + 1..position {
            let Kept { token, prefix } = at(p);
            assert_eq!(prefix, kv_value(at(p - 1).prefix, token), "position {p} before {position} is of another text");
        }
        position.checked_sub(1).map_or(0, |p| at(p).prefix)
    }
}

impl Kind for InPlace {
    type State = StateSlots;
    const BLOCK_TOKENS: usize = 128;
    const SCALE: usize = 6;
    const BLOCKS: usize = 7;
    const DRAFTS: bool = true;
    const STEPS_PER_PREEMPTION: u64 = 5000;

    fn new(rng: &mut Rng, sequences: usize) -> (StateSlots, Self) {
        let (snapshots, block_tokens) = (rng.below(6), Self::BLOCK_TOKENS);
        let interval = if snapshots == 0 { 0 } else { block_tokens };
        let config = StateConfig { sequences, snapshots, interval, block_tokens, within_chunks: false };
        (StateSlots::new(config), Self { slots: vec![vec![Kept::default(); RING]; sequences + snapshots] })
    }

    fn run(&mut self, step: &Step<Segment>, tokens: &[u32], prefixes: &[u64]) {
        check_cover(step);
        check_chains(&step.state);
        assert_eq!(step.state.len(), step.rows.len(), "a chunk is one segment");
        for segment in &step.state {
            if !begins(step, segment) && segment.from != segment.to {
                self.slots[segment.to as usize] = self.slots[segment.from as usize].clone();
            }
        }
        for segment in &step.state {
            let (ring, first) = (&mut self.slots[segment.to as usize], step.positions[segment.first as usize] as usize);
            advance(Self::before(ring, first), segment, tokens, prefixes);
            for (t, p) in segment.tokens().zip(first..) {
                ring[p % RING] = Kept { token: tokens[t], prefix: prefixes[t] };
            }
        }
    }

    fn check(state: &StateSlots) {
        Recurrent::check(state);
    }

    fn check_idle(state: &StateSlots) {
        Recurrent::check_idle(state);
    }
}

/// State after a segment; must agree with the KV cache at each token.
fn advance(before: u64, segment: &Segment, tokens: &[u32], prefixes: &[u64]) -> u64 {
    let mut state = before;
    for t in segment.tokens() {
        state = kv_value(state, tokens[t]);
        assert_eq!(state, prefixes[t], "token {t} of the step met the state of another prefix");
    }
    state
}

/// True if a segment starts its sequence.
fn begins(step: &Step<Segment>, segment: &Segment) -> bool {
    let begins = step.positions[segment.first as usize] == 0;
    assert_eq!(begins, segment.from == NO_STATE, "a state of zeros is for the first token alone");
    begins
}

/// Checks that segments are consecutive and cover the step.
fn check_cover(step: &Step<Segment>) {
    let covered = step.state.iter().fold(0, |covered, segment| {
        assert_eq!(segment.first, covered, "segments follow each other");
        segment.end
    });
    assert_eq!(covered as usize, step.tokens.len(), "segments cover the step");
}

/// Checks that segments that are not chained do not touch a slot that another one writes, because they run at once.
fn check_chains(segments: &[Segment]) {
    let chains: Vec<_> = segments.chunk_by(|before, next| next.from == before.to).collect();
    let mut writer = HashMap::new();
    for (i, chain) in chains.iter().enumerate() {
        for segment in chain.iter().filter(|segment| segment.to != NO_STATE) {
            assert_eq!(*writer.entry(segment.to).or_insert(i), i, "two sequences write slot {}", segment.to);
        }
    }
    for (i, chain) in chains.iter().enumerate() {
        let other = writer.get(&chain[0].from).is_some_and(|writer| *writer != i);
        assert!(!other, "a sequence reads slot {}, which another one writes", chain[0].from);
    }
}
