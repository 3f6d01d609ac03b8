//! States outside of KV blocks, on a disk.

use super::copies::tiers;
use super::media::{Found, MediaSlots};
use super::{BLOCK_TOKENS, outcome};
use pegainfer_core::engine::{GenerateRequest, RequestId, TokenEvent};
use pegainfer_core::kv::BlockPool;
use pegainfer_core::kv::disk::SlotHeader;
use pegainfer_core::kv::tiers::{Direction, TierStats, Transfer, TransferDone};
use pegainfer_core::schedule::{Scheduler, SchedulerConfig, StateConfig, StateSlots};
use std::time::Duration;

/// Tokens of a prompt that are cached: six blocks with a state after each second one.
const CACHED: usize = 6 * BLOCK_TOKENS;

/// A scheduler with six snapshots on the device, and the transfers so far.
struct Engine {
    scheduler: Scheduler<StateSlots>,
    requests: u64,
    transfers: Vec<Transfer>,
    /// Every copy that is read fails.
    reads_fail: bool,
}

impl Engine {
    fn new(slots: MediaSlots, found: Found) -> Self {
        let config = SchedulerConfig {
            max_num_seqs: 2,
            max_num_batched_tokens: 256,
            max_num_mixed_tokens: 64,
            speculation: None,
            eos_token_ids: vec![],
            max_loras: 0,
        };
        let (interval, block_tokens) = (2 * BLOCK_TOKENS, BLOCK_TOKENS);
        let states = StateConfig { sequences: 2, snapshots: 6, interval, block_tokens, within_chunks: true };
        let pool = BlockPool::new(20, BLOCK_TOKENS);
        let mut scheduler = Scheduler::new(config, pool.clone(), StateSlots::new(states));
        scheduler.use_tiers(tiers(&pool, slots, found));
        Self { scheduler, requests: 0, transfers: Vec::new(), reads_fail: false }
    }

    /// Runs a request of six blocks and a token until no transfer is left; returns its cached tokens.
    fn run(&mut self, text: u32) -> usize {
        let tokens = (0..CACHED as u32 + 1).map(|i| (text + i) % 50).collect::<Vec<u32>>();
        self.scheduler.add(RequestId(self.requests), GenerateRequest::greedy(tokens, 1));
        self.requests += 1;
        let mut cached = 0;
        while self.scheduler.has_work() {
            let (step, admitted) = self.scheduler.plan(false);
            for (_, event) in admitted {
                if let TokenEvent::Admitted { cached_tokens } = event {
                    cached = cached_tokens;
                }
            }
            if !step.is_empty() {
                self.scheduler.commit(&step, outcome(vec![1; step.samples.len()]));
            }
            for transfer in self.scheduler.take_transfers() {
                let fails = self.reads_fail && transfer.direction == Direction::Read;
                let sums = vec![7; transfer.blocks.len() + transfer.states.len()];
                let result = if fails { Err("a test says so".to_owned()) } else { Ok(sums) };
                self.scheduler.finish_transfer(TransferDone {
                    id: transfer.id,
                    result,
                    took: Duration::from_micros(1),
                });
                self.transfers.push(transfer);
            }
        }
        self.scheduler.tiers().unwrap().check().unwrap();
        cached
    }

    fn stats(&self) -> TierStats {
        self.scheduler.stats().tiers
    }

    /// What is in the slots of the disk after all transfers: blocks, and states.
    fn found(&self) -> Found {
        let mut slots: [std::collections::BTreeMap<u32, SlotHeader>; 2] = Default::default();
        for Transfer { direction, blocks, states, headers, .. } in &self.transfers {
            for (slots, copies) in slots.iter_mut().zip([blocks, states]) {
                match direction {
                    Direction::Write => slots.extend(copies.iter().map(|copy| copy.block).zip(headers.iter().cloned())),
                    Direction::Erase => copies.iter().for_each(|copy| drop(slots.remove(&copy.block))),
                    _ => {}
                }
            }
        }
        slots.map(|slots| slots.into_iter().collect())
    }
}

const ROOMY: MediaSlots = MediaSlots { host: 40, disk: 40, host_states: 20, disk_states: 20 };

#[test]
fn a_state_is_read_together_with_the_blocks_before_it() {
    let mut engine = Engine::new(ROOMY, Found::default());
    assert_eq!(engine.run(0), 0);
    assert_eq!((engine.stats().disk_used, engine.stats().state_disk_used), (6, 3));
    let mut next = Engine::new(ROOMY, engine.found());
    assert_eq!(next.run(0), CACHED);
    let reads: Vec<&Transfer> = next.transfers.iter().filter(|of| of.direction == Direction::Read).collect();
    assert_eq!(reads.len(), 1);
    assert_eq!((reads[0].blocks.len(), reads[0].states.len()), (6, 1), "only the last state is needed");
    assert_eq!((next.stats().read_blocks, next.stats().read_states, next.stats().loaded_states), (6, 1, 1));
}

#[test]
fn without_one_of_both_the_prompt_is_computed() {
    let mut engine = Engine::new(ROOMY, Found::default());
    engine.run(0);
    let [blocks, states] = engine.found();
    let mut without_states = Engine::new(ROOMY, [blocks.clone(), vec![]]);
    assert_eq!((without_states.run(0), without_states.stats().read_blocks), (0, 0));
    let mut without_blocks = Engine::new(ROOMY, [vec![], states.clone()]);
    assert_eq!((without_blocks.run(0), without_blocks.stats().read_states), (0, 0));
    // An earlier state, and the blocks before it.
    let last = blocks.iter().find(|(_, block)| blocks.iter().all(|(_, other)| other.parent != Some(block.name)));
    let name = last.unwrap().1.name;
    let earlier = states.into_iter().filter(|(_, state)| state.name != name).collect();
    let mut shorter = Engine::new(ROOMY, [blocks, earlier]);
    assert_eq!((shorter.run(0), shorter.stats().read_blocks), (4 * BLOCK_TOKENS, 4));
}

#[test]
fn a_read_that_fails_is_a_miss() {
    let mut engine = Engine::new(ROOMY, Found::default());
    engine.run(0);
    let mut next = Engine::new(ROOMY, engine.found());
    next.reads_fail = true;
    assert_eq!((next.run(0), next.stats().read_states), (0, 0));
    assert_eq!(next.stats().state_disk_used, 3, "the disk may be better next time");
}

#[test]
fn a_full_disk_takes_only_states_that_were_used_again() {
    let mut engine = Engine::new(MediaSlots { disk_states: 3, ..ROOMY }, Found::default());
    engine.run(0);
    engine.run(10);
    let before = engine.found();
    assert_eq!(engine.stats().written_states, 3, "of the first text");
    assert_eq!(engine.run(10), CACHED, "the device has it");
    let [_, states] = engine.found();
    assert_eq!((engine.stats().written_states, states.len()), (4, 3), "the state that was resumed from");
    assert_ne!(before[1], states);
    let mut next = Engine::new(MediaSlots { disk_states: 3, ..ROOMY }, engine.found());
    assert_eq!(next.run(10), CACHED);
}

#[test]
fn a_state_leaves_the_disk_with_the_block_before_it() {
    let slots = MediaSlots { disk: 6, ..ROOMY };
    let mut engine = Engine::new(slots, Found::default());
    engine.run(0);
    engine.run(10);
    assert_eq!((engine.stats().disk_used, engine.stats().state_disk_used), (6, 3), "no place for the second text");
    engine.run(10);
    let [blocks, states] = engine.found();
    assert_eq!(blocks.len(), 6);
    let has_block = |name| blocks.iter().any(|(_, block)| block.name == name);
    assert!(!states.is_empty() && states.iter().all(|(_, state)| has_block(state.name)), "{states:?}");
    assert_eq!(states.len(), engine.stats().state_disk_used);
    let mut next = Engine::new(slots, [blocks, states]);
    assert_eq!(next.run(10), CACHED);
}

/// Nothing would be found that is larger than the host.
#[test]
fn a_prompt_larger_than_the_host_is_read_up_to_a_state_that_fits() {
    let mut engine = Engine::new(ROOMY, Found::default());
    engine.run(0);
    let mut next = Engine::new(MediaSlots { host: 5, ..ROOMY }, engine.found());
    assert_eq!((next.run(0), next.stats().read_blocks), (4 * BLOCK_TOKENS, 4));
}

#[test]
fn a_cleared_cache_has_no_states_on_the_disk() {
    let mut engine = Engine::new(ROOMY, Found::default());
    engine.run(0);
    engine.scheduler.reset_prefix_cache();
    assert_eq!(engine.run(10), 0);
    assert_eq!(engine.found().map(|found| found.len()), [6, 3], "of the second text");
    let mut next = Engine::new(ROOMY, engine.found());
    assert_eq!((next.run(0), next.run(10)), (0, CACHED));
}
