use super::*;
use pegainfer_core::kv::ContentName;
use pegainfer_core::kv::disk::{DiskConfig, SlotHeader};
use pegainfer_core::kv::tiers::BlockCopy;
use pegainfer_testing::TempDir;

/// Bytes of a block, and of a state.
const BYTES: [usize; 2] = [4096, 3 * 4096];

fn store(dir: &TempDir, kind: SlotKind) -> DiskStore<AlignedMemory> {
    let (path, bytes) = (dir.path().join(format!("{kind:?}")), BYTES[kind as usize]);
    let config = DiskConfig::new(&path, 1 << 20, bytes, 4, [0; 32]);
    DiskStore::open(&DiskConfig { queue: 2, ..config }).unwrap().0
}

/// A transfer between slots of the same numbers.
fn transfer(id: u64, direction: Direction, [blocks, states]: [u32; 2]) -> Progress {
    let copies = |number: u32| (0..number).map(|slot| BlockCopy { block: slot, slot }).collect::<Vec<_>>();
    let name = ContentName::from_bytes([7; 16]).unwrap();
    let header = SlotHeader { name, parent: None, tokens: vec![1; 4], checksum: 0 };
    let headers = vec![header; (blocks + states) as usize];
    let (blocks, states) = (copies(blocks), copies(states));
    Progress::new(Transfer { id: TransferId(id), direction, blocks, states, headers })
}

/// A byte that is of this slot alone.
fn byte(kind: SlotKind, slot: u32) -> u8 {
    10 * (1 + kind as u8) + slot as u8
}

fn fill(kind: SlotKind, slot: u32, bytes: &mut [u8]) -> Result<(), String> {
    assert_eq!(bytes.len(), BYTES[kind as usize]);
    bytes.fill(byte(kind, slot));
    Ok(())
}

/// Runs a transfer to its end; returns that, and what was read.
fn run(disk: &mut Disk, mut progress: Progress) -> (TransferDone, Vec<(SlotKind, u32)>) {
    let mut read = Vec::new();
    loop {
        disk.submit(&mut progress, &mut 1000, fill);
        let done = disk.finished(Duration::from_secs(10), |kind, slot, bytes| {
            assert!(bytes.len() == BYTES[kind as usize] && bytes.iter().all(|own| *own == byte(kind, slot)));
            read.push((kind, slot));
            Ok(())
        });
        if let Some(done) = done.into_iter().next() {
            assert!(progress.next().is_none() && !disk.is_busy());
            return (done, read);
        }
    }
}

#[test]
fn blocks_and_states_of_one_transfer_come_from_their_files() {
    let dir = TempDir::new("disk");
    let mut disk = Disk::new(store(&dir, SlotKind::Block), Some(store(&dir, SlotKind::State)));
    assert!(run(&mut disk, transfer(0, Direction::Write, [5, 0])).0.result.is_ok());
    assert!(run(&mut disk, transfer(1, Direction::Write, [0, 3])).0.result.is_ok());
    let (done, mut read) = run(&mut disk, transfer(2, Direction::Read, [5, 3]));
    assert!(done.result.is_ok() && done.id == TransferId(2));
    read.sort_by_key(|(kind, slot)| (*kind as usize, *slot));
    let expected = (0..5).map(|slot| (SlotKind::Block, slot)).chain((0..3).map(|slot| (SlotKind::State, slot)));
    assert_eq!(read, expected.collect::<Vec<_>>());
    for (id, slots) in [(3, [5, 0]), (4, [0, 3])] {
        assert!(run(&mut disk, transfer(id, Direction::Erase, slots)).0.result.is_ok());
    }
}

#[test]
fn one_state_is_written_at_a_time_and_others_count_as_many_blocks() {
    let dir = TempDir::new("disk");
    let mut disk = Disk::new(store(&dir, SlotKind::Block), Some(store(&dir, SlotKind::State)));
    for (id, direction, expected) in [(0, Direction::Write, (1, 0)), (1, Direction::Read, (2, 1))] {
        let (mut progress, mut left) = (transfer(id, direction, [0, 2]), 7);
        disk.submit(&mut progress, &mut left, fill);
        assert_eq!((progress.begun, left), expected, "{direction:?}");
        assert!(run(&mut disk, progress).0.result.is_ok());
    }
}

#[test]
fn states_without_a_file_are_a_failure() {
    let dir = TempDir::new("disk");
    let mut disk = Disk::new(store(&dir, SlotKind::Block), None);
    run(&mut disk, transfer(1, Direction::Write, [2, 0]));
    let (done, _) = run(&mut disk, transfer(0, Direction::Read, [2, 1]));
    assert!(done.result.unwrap_err().contains("no file"));
}
