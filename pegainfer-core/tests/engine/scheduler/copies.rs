//! Copies of blocks in the worlds, and in two small ones.

use super::media::{Found, MediaSlots};
use super::{BLOCK_TOKENS, outcome, scheduler, scheduler_with_adapters};
use pegainfer_core::adapter::{Adapter, AdapterId};
use pegainfer_core::engine::{GenerateRequest, RequestId, TokenEvent};
use pegainfer_core::kv::tiers::{Direction, KeptState, Tiers, Transfer, TransferDone};
use pegainfer_core::kv::{BlockPool, ContentName, KvChange, Medium, Naming, StoredRun};
use pegainfer_core::schedule::Scheduler;
use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

/// Names that every run of a world has.
fn naming() -> Naming {
    Naming::new(&[7; 32], "a model")
}

/// Tiers with so many slots, some of which have these blocks and states on the disk.
pub fn tiers<K: KeptState>(pool: &BlockPool, slots: MediaSlots, [blocks, states]: Found) -> Tiers<K> {
    let mut tiers = Tiers::new(pool.clone(), naming(), slots.host, 1);
    if slots.disk > 0 {
        tiers.use_disk(slots.disk, blocks);
    }
    if slots.host_states > 0 {
        tiers.use_states(slots.host_states, 3);
    }
    if slots.disk_states > 0 {
        tiers.use_state_disk(slots.disk_states, states);
    }
    pool.watch_changes(100_000);
    tiers
}

/// Follows the log of changes, which names no block twice in a medium.
pub fn follow(told: &mut BTreeSet<(Medium, ContentName)>, pool: &BlockPool) {
    let changes = pool.take_changes();
    assert!(!changes.lost);
    for change in changes.list {
        match change {
            KvChange::Stored(StoredRun { medium, root, parent, names, tokens, .. }) => {
                let (naming, size) = (naming(), pool.block_tokens());
                let mut last = parent.unwrap_or_else(|| naming.root(root));
                for (name, tokens) in names.iter().zip(tokens.chunks_exact(size)) {
                    last = naming.next(last, tokens, &[]);
                    assert_eq!(*name, last, "a block has the name of another one");
                }
                names.into_iter().for_each(|name| assert!(told.insert((medium, name)), "{name:?} is there"));
            }
            KvChange::Removed { medium, names } => {
                let removed = |name| told.remove(&(medium, name));
                // What a restart found on the disk was not told.
                assert!(names.into_iter().map(removed).all(|was| was || medium == Medium::Disk));
            }
            KvChange::Cleared => told.clear(),
        }
    }
}

/// A scheduler over 20 blocks, with copies in 40 slots of the host and 40 of the disk.
fn with_copies() -> Scheduler {
    let mut scheduler = scheduler(4, 256, 20);
    let tiers = tiers(scheduler.pool(), MediaSlots { host: 40, disk: 40, ..MediaSlots::default() }, Found::default());
    scheduler.use_tiers(tiers);
    scheduler
}

/// Six blocks and a token.
fn request(first: u32) -> GenerateRequest {
    let tokens = (0..6 * BLOCK_TOKENS as u32 + 1).map(|i| (first + i) % 50).collect::<Vec<u32>>();
    GenerateRequest { ignore_eos: true, ..GenerateRequest::greedy(tokens, 1) }
}

/// Ends transfers, each block of which has its slot of the host as checksum.
fn end(scheduler: &mut Scheduler, transfers: Vec<Transfer>) {
    for Transfer { id, blocks, .. } in transfers {
        let result = Ok(blocks.iter().map(|copy| u64::from(copy.slot)).collect());
        scheduler.finish_transfer(TransferDone { id, result, took: Duration::from_micros(1) });
    }
}

/// Runs steps until all is done, transfers included; returns the cached tokens of each admission, and all transfers.
fn run(scheduler: &mut Scheduler) -> (Vec<usize>, Vec<Transfer>) {
    let (mut cached, mut all) = (Vec::new(), Vec::new());
    while scheduler.has_work() {
        let (step, admitted) = scheduler.plan(false);
        cached.extend(admitted.iter().filter_map(|(_, event)| match event {
            TokenEvent::Admitted { cached_tokens } => Some(*cached_tokens),
            _ => None,
        }));
        if !step.is_empty() {
            scheduler.commit(&step, outcome(vec![1; step.samples.len()]));
        }
        let transfers = scheduler.take_transfers();
        all.extend(transfers.iter().cloned());
        end(scheduler, transfers);
    }
    scheduler.tiers().unwrap().check().unwrap();
    scheduler.check_blocks().unwrap();
    (cached, all)
}

/// Texts that fill the pool, one after the other.
fn fill(scheduler: &mut Scheduler) {
    for id in 0..5 {
        scheduler.add(RequestId(id), request(10 * id as u32));
        run(scheduler);
    }
}

#[test]
fn two_requests_for_one_prompt_share_a_load() {
    let mut scheduler = with_copies();
    fill(&mut scheduler);
    scheduler.add(RequestId(10), request(0));
    scheduler.add(RequestId(11), request(0));
    let (cached, transfers) = run(&mut scheduler);
    assert_eq!(cached, [6 * BLOCK_TOKENS; 2]);
    let loads = transfers.iter().filter(|transfer| transfer.direction == Direction::Load).count();
    assert_eq!((loads, scheduler.stats().tiers.hits), (1, 6 * BLOCK_TOKENS as u64));
}

#[test]
fn others_run_while_a_request_waits_and_what_is_late_is_computed() {
    let mut scheduler = with_copies();
    fill(&mut scheduler);
    scheduler.add(RequestId(10), request(0));
    scheduler.add(RequestId(11), GenerateRequest { ignore_eos: true, ..GenerateRequest::greedy(vec![9; 20], 1) });
    let (step, admitted) = scheduler.plan(false);
    assert_eq!(admitted.iter().map(|(id, _)| id.0).collect::<Vec<_>>(), [11], "the first one waits for its blocks");
    scheduler.commit(&step, outcome(vec![1; step.samples.len()]));
    let load = scheduler.take_transfers().into_iter().find(|transfer| transfer.direction == Direction::Load).unwrap();
    scheduler.give_up(load.id);
    let (step, admitted) = scheduler.plan(false);
    assert_eq!(admitted, [(RequestId(10), TokenEvent::Admitted { cached_tokens: 0 })]);
    scheduler.commit(&step, outcome(vec![1; step.samples.len()]));
    assert!(scheduler.has_work(), "the load still has its blocks");
    end(&mut scheduler, vec![load]);
    scheduler.check_blocks().unwrap();
}

/// The next start counts adapters anew, so that their numbers in names mean others.
#[test]
fn blocks_of_adapters_are_not_written_to_the_disk() {
    let mut scheduler = scheduler_with_adapters(1);
    let tiers = tiers(scheduler.pool(), MediaSlots { host: 40, disk: 40, ..MediaSlots::default() }, Found::default());
    scheduler.use_tiers(tiers);
    let adapter = Arc::new(Adapter::new(AdapterId(NonZeroU32::MIN), ()));
    for (id, adapter) in [None, Some(adapter)].into_iter().enumerate() {
        scheduler.add(RequestId(id as u64), GenerateRequest { adapter, ..request(0) });
        run(&mut scheduler);
    }
    let stats = scheduler.stats().tiers;
    assert_eq!((stats.host_used, stats.disk_used), (12, 6));
}

#[test]
fn a_cleared_cache_is_not_found_on_the_disk_by_the_next_start() {
    let mut scheduler = with_copies();
    fill(&mut scheduler);
    let used = scheduler.stats().tiers.disk_used;
    assert_eq!(used, 30, "five texts of six blocks");
    scheduler.reset_prefix_cache();
    let (_, transfers) = run(&mut scheduler);
    let erased: BTreeSet<u32> = transfers
        .iter()
        .filter(|transfer| transfer.direction == Direction::Erase)
        .flat_map(|transfer| transfer.blocks.iter().map(|copy| copy.block))
        .collect();
    assert_eq!((erased.len(), scheduler.stats().tiers.disk_used), (used, 0));
}
