//! Tests of whole stores.

mod damage;
mod faults;
mod killed;
mod refusals;
mod round_trips;
mod speed;

use super::*;
use crate::kv::ContentName;
use crate::rng;
use pegainfer_testing::TempDir;
use std::path::PathBuf;
use std::time::{Duration, Instant};

type Store = DiskStore<AlignedMemory>;

const TOKENS: usize = 16;
const FINGERPRINT: [u8; 32] = [7; 32];

/// Configurations of a file with `slots` slots, for each backend that this system has, with and without direct I/O.
fn configs(dir: &TempDir, slots: u32, slot_bytes: usize) -> Vec<DiskConfig> {
    let geometry = format::Geometry { slot_bytes, header_bytes: 256, slots };
    let backends = [
        (DiskBackend::Threads, true),
        (DiskBackend::Ring, true),
        (DiskBackend::Threads, false),
        (DiskBackend::Ring, false),
    ];
    let configs =
        backends.into_iter().filter(|(backend, _)| *backend == DiskBackend::Threads || has_ring()).enumerate();
    configs
        .map(|(i, (backend, direct))| {
            let path = dir.path().join(format!("kv-{i}"));
            let config = DiskConfig::new(&path, geometry.file_bytes(), slot_bytes, TOKENS, FINGERPRINT);
            DiskConfig { backend, direct, ..config }
        })
        .collect()
}

/// One configuration.
fn config(dir: &TempDir, slots: u32) -> DiskConfig {
    configs(dir, slots, 8192).swap_remove(0)
}

/// True if io_uring can be tested here.
#[cfg(target_os = "linux")]
fn has_ring() -> bool {
    let ring = ring::Ring::new(1);
    if let Err(error) = &ring {
        eprintln!("io_uring is not tested: {error}");
    }
    ring.is_ok()
}

#[cfg(not(target_os = "linux"))]
fn has_ring() -> bool {
    false
}

fn open(config: &DiskConfig) -> (Store, Opened) {
    DiskStore::open(config).unwrap()
}

fn path_and_bytes(config: &DiskConfig) -> (PathBuf, Vec<u8>) {
    (config.path.clone(), std::fs::read(&config.path).unwrap())
}

/// Payload of block `number`.
fn payload(number: u64, bytes: usize) -> AlignedMemory {
    let mut memory = AlignedMemory::zeroed(bytes);
    for (i, chunk) in memory.as_mut_slice().chunks_mut(8).enumerate() {
        chunk.copy_from_slice(&rng::bits(number, i as u64).to_le_bytes()[..chunk.len()]);
    }
    memory
}

/// A checksum as a caller would have it.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(1, |sum, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        rng::bits(sum, u64::from_le_bytes(word))
    })
}

fn name(number: u64) -> ContentName {
    ContentName::from_bytes((u128::from(number) << 64 | u128::from(number + 1)).to_be_bytes()).unwrap()
}

/// Header of block `number`.
fn header(number: u64, payload: &AlignedMemory) -> SlotHeader {
    SlotHeader {
        name: name(number),
        parent: number.checked_sub(1).map(name),
        tokens: (0..number % (TOKENS as u64 + 1)).map(|i| rng::bits(number, i) as u32).collect(),
        checksum: checksum(payload.as_slice()),
    }
}

/// Number of the block with this name.
fn number(header: &SlotHeader) -> u64 {
    u128::from_be_bytes(header.name.to_bytes()) as u64 - 1
}

/// Submits the write of block `number`, whose number is also the ticket.
fn write(store: &Store, slot: u32, number: u64) -> Result<(), Refused<AlignedMemory>> {
    let payload = payload(number, store.slot_bytes());
    store.write(number, slot, &header(number, &payload), payload)
}

fn read(store: &Store, ticket: u64, slot: u32) -> Result<(), Refused<AlignedMemory>> {
    store.read(ticket, slot, AlignedMemory::zeroed(store.slot_bytes()))
}

/// Waits for `count` finished jobs.
fn wait(store: &Store, count: usize) -> Vec<Done<AlignedMemory>> {
    let (mut done, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(60));
    while done.len() < count {
        assert!(Instant::now() < deadline, "{} of {count} jobs are finished", done.len());
        store.wait(&mut done, Duration::from_secs(1));
    }
    assert_eq!(done.len(), count);
    done
}

/// Saves blocks into the slots with their numbers.
fn save(store: &Store, numbers: std::ops::Range<u32>) {
    for number in numbers {
        write(store, number, number.into()).unwrap();
        wait(store, 1).remove(0).result.unwrap();
    }
}

/// The payload of `slot`.
fn load(store: &Store, slot: u32) -> AlignedMemory {
    read(store, 0, slot).unwrap();
    let done = wait(store, 1).remove(0);
    done.result.unwrap();
    done.memory.unwrap()
}

/// Reads all found blocks, and returns their slots and numbers. Fails if one has other bytes than were saved.
fn verified(store: &Store, opened: &Opened) -> Vec<(u32, u64)> {
    let check = |found: &Found| {
        let payload = load(store, found.slot);
        let number = number(&found.header);
        assert_eq!(found.header, header(number, &payload), "slot {} has wrong bytes", found.slot);
        (found.slot, number)
    };
    opened.found.iter().map(check).collect()
}
