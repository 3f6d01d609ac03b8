//! Blocks come back, at once and after a restart.

use super::*;
use pegainfer_testing::{Rng, seed};
use std::collections::HashMap;

const SLOTS: u32 = 24;

/// Random jobs on random slots, many at a time. Returns which block each slot holds at the end.
fn run_random_jobs(store: &Store, rng: &mut Rng, jobs: u64) -> HashMap<u32, u64> {
    let mut held = HashMap::new();
    let (mut pending, mut done) = (HashMap::new(), Vec::new());
    for ticket in 0..jobs {
        let slot = rng.below(SLOTS as usize) as u32;
        let accepted = match rng.below(8) {
            0..3 => write(store, slot, ticket).map(|()| held.insert(slot, ticket)),
            3 => store.erase(ticket, slot).map(|()| held.remove(&slot)),
            _ => read(store, ticket, slot).map(|()| held.get(&slot).copied()),
        };
        match accepted {
            // For a read: the block that it must see.
            Ok(expected) => _ = pending.insert(ticket, (slot, expected)),
            Err(refused) => assert_eq!(refused.reason, RefusedReason::Busy),
        }
        while pending.len() > 12 || (ticket == jobs - 1 && !pending.is_empty()) {
            store.wait(&mut done, Duration::from_secs(60));
            for done in done.drain(..) {
                let (slot, expected) = pending.remove(&done.ticket).expect("each ticket is done once");
                done.result.unwrap();
                assert_eq!(done.slot, slot);
                if let (true, Some(number)) = (done.is_read, expected) {
                    let memory = done.memory.unwrap();
                    assert!(memory.as_slice() == payload(number, store.slot_bytes()).as_slice(), "slot {slot}");
                }
            }
        }
    }
    held
}

#[test]
fn blocks_come_back_by_every_backend_and_after_a_restart() {
    let (dir, mut rng) = (TempDir::new("disk"), Rng(seed()));
    let all = [8192, 65_536, 5000].into_iter().flat_map(|bytes| configs(&dir, SLOTS, bytes));
    for config in all {
        // The file of the other slot size is made new.
        let (store, opened) = open(&config);
        assert_eq!((opened.slots, store.slots(), opened.found.len()), (SLOTS, SLOTS, 0), "{config:?}");
        let held = run_random_jobs(&store, &mut rng, 600);
        let secret = store.secret();
        drop(store);

        let (store, opened) = open(&config);
        assert_eq!((store.secret(), opened.reset), (secret, None));
        let found: HashMap<_, _> = verified(&store, &opened).into_iter().collect();
        assert_eq!(found, held, "{config:?}");
        assert!(opened.found.is_sorted_by_key(|found| found.sequence));
        assert_eq!((opened.damaged, opened.missing, opened.duplicates), (0, 0, 0));
    }
}

#[test]
fn writes_after_a_restart_are_newer() {
    let dir = TempDir::new("disk");
    let config = config(&dir, 8);
    for number in 0..5 {
        let (store, _) = open(&config);
        save(&store, number..number + 1);
    }
    let (_, opened) = open(&config);
    let order: Vec<_> = opened.found.iter().map(|found| (found.sequence, found.slot)).collect();
    assert_eq!(order, [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]);
}

#[test]
fn of_two_slots_with_one_block_the_newer_one_stays() {
    let dir = TempDir::new("disk");
    let config = config(&dir, 8);
    let (store, _) = open(&config);
    for (slot, number) in [(0, 5), (1, 6), (2, 5)] {
        write(&store, slot, number).unwrap();
        wait(&store, 1);
    }
    drop(store);
    let (store, opened) = open(&config);
    assert_eq!(verified(&store, &opened), [(1, 6), (2, 5)]);
    assert_eq!(opened.duplicates, 1);
    drop(store);
    assert_eq!(open(&config).1.duplicates, 0, "it was erased");
}

#[test]
fn direct_io_is_used_or_the_reason_is_told() {
    let dir = TempDir::new("disk");
    for config in configs(&dir, 4, 8192) {
        let (_, opened) = open(&config);
        assert!(config.direct || opened.not_direct.is_some());
        assert_eq!(opened.not_direct.is_some(), opened.to_string().contains("page cache"), "{opened}");
    }
}

#[test]
fn without_io_uring_threads_do_the_work() {
    let dir = TempDir::new("disk");
    // More than the kernel gives, and nothing on other systems.
    let config = DiskConfig { backend: DiskBackend::Auto, depth: 1 << 20, ..config(&dir, 4) };
    let (store, opened) = open(&config);
    assert!(opened.no_ring.is_some() && opened.to_string().contains("instead of io_uring"), "{opened}");
    save(&store, 0..4);
    assert!(load(&store, 2).as_slice() == payload(2, 8192).as_slice());
    drop(store);
    let refused = Store::open(&DiskConfig { backend: DiskBackend::Ring, ..config }).unwrap_err();
    assert!(matches!(refused, DiskError::Start(_)), "{refused}");
}

#[test]
fn a_store_can_be_shared_by_threads() {
    let dir = TempDir::new("disk");
    for config in configs(&dir, 16, 8192) {
        let (store, _) = open(&config);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let store = &store;
                scope
                    .spawn(move || (0..4).for_each(|i| write(store, 4 * thread + i, (4 * thread + i).into()).unwrap()));
            }
        });
        wait(&store, 16).into_iter().for_each(|done| done.result.unwrap());
        drop(store);
        let (store, opened) = open(&config);
        assert_eq!(verified(&store, &opened).len(), 16);
    }
}
