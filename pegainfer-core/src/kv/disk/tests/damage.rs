//! Files that were changed, cut, or belong to somebody else.

use super::*;
use pegainfer_testing::{Rng, seed};

const SLOTS: u32 = 8;

/// A closed file with a block in each slot.
fn full_file(dir: &TempDir) -> DiskConfig {
    let config = config(dir, SLOTS);
    save(&open(&config).0, 0..SLOTS);
    config
}

fn geometry() -> format::Geometry {
    format::Geometry { slot_bytes: 8192, header_bytes: 256, slots: SLOTS }
}

#[test]
fn a_changed_bit_of_a_header_hides_the_block() {
    let (dir, mut rng) = (TempDir::new("disk"), Rng(seed()));
    let config = full_file(&dir);
    let (path, bytes) = path_and_bytes(&config);
    for _ in 0..100 {
        let slot = rng.below(SLOTS as usize) as u32;
        // Bytes of a header without tokens.
        let bit = rng.below(8 * 68);
        let mut changed = bytes.clone();
        changed[geometry().header_offset(slot) as usize + bit / 8] ^= 1 << (bit % 8);
        std::fs::write(&path, changed).unwrap();
        let (store, opened) = open(&config);
        assert!(verified(&store, &opened).iter().all(|(found, _)| *found != slot), "bit {bit}");
        assert_eq!(opened.found.len() as u32, SLOTS - 1);
        // With a changed epoch the slot counts as one of an earlier file.
        assert_eq!(opened.damaged, u32::from(!(64..128).contains(&bit)), "bit {bit}");
        drop(store);
        assert_eq!(open(&config).1.damaged, 0, "it was erased");
    }
}

#[test]
fn a_changed_bit_of_a_payload_is_found_by_its_checksum() {
    let (dir, mut rng) = (TempDir::new("disk"), Rng(seed()));
    let config = full_file(&dir);
    let (path, bytes) = path_and_bytes(&config);
    for _ in 0..50 {
        let slot = rng.below(SLOTS as usize) as u32;
        let bit = rng.below(8 * 8192);
        let mut changed = bytes.clone();
        changed[geometry().payload_offset(slot) as usize + bit / 8] ^= 1 << (bit % 8);
        std::fs::write(&path, changed).unwrap();
        let (store, opened) = open(&config);
        assert_eq!(opened.found.len() as u32, SLOTS);
        for found in &opened.found {
            let matches = checksum(load(&store, found.slot).as_slice()) == found.header.checksum;
            assert_eq!(matches, found.slot != slot, "bit {bit}");
        }
    }
}

#[test]
fn of_a_truncated_file_the_rest_is_used() {
    let dir = TempDir::new("disk");
    let config = full_file(&dir);
    let (path, bytes) = path_and_bytes(&config);
    let cut = |len: usize| {
        std::fs::write(&path, &bytes[..len]).unwrap();
        let (store, opened) = open(&config);
        let found = verified(&store, &opened).len() as u32;
        assert_eq!(std::fs::metadata(&path).unwrap().len(), geometry().file_bytes());
        drop(store);
        let (_, again) = open(&config);
        assert_eq!((again.found.len() as u32, again.missing), (found, 0), "what is missing was erased");
        (found, opened.missing, opened.reset)
    };
    let payload = |slot| geometry().payload_offset(slot) as usize;
    assert_eq!(cut(payload(3)), (3, 5, None));
    assert_eq!(cut(payload(3) - 1), (2, 6, None));
    assert_eq!(cut(payload(0)), (0, 8, None));
    assert_eq!(cut(4096 + 256 * 4 + 100), (0, 5, None), "after all of the fifth header");
    assert_eq!(cut(4096 + 256 * 4 + 60), (0, 4, None), "within the fifth header");
    assert_eq!(cut(4096), (0, 0, None));
    assert_eq!(cut(100), (0, 0, Some(Reset::Damaged)));
    assert_eq!(cut(0), (0, 0, None));
}

#[test]
fn files_that_cannot_be_used_are_made_new() {
    let dir = TempDir::new("disk");
    let config = full_file(&dir);
    let (path, bytes) = path_and_bytes(&config);
    let other_model = DiskConfig { fingerprint: [8; 32], ..config.clone() };
    let other_size = DiskConfig { bytes: config.bytes + 100_000, ..config.clone() };
    let with_byte = |at: usize, byte| {
        let mut changed = bytes.clone();
        changed[at] = byte;
        changed
    };
    let cases = [
        (bytes.clone(), &other_model, Reset::OtherModel),
        (bytes.clone(), &other_size, Reset::OtherSize),
        (with_byte(16, 0), &config, Reset::OtherVersion(0)),
        (with_byte(16, 9), &config, Reset::OtherVersion(9)),
        (with_byte(1000, 1), &config, Reset::Damaged),
    ];
    for (bytes, config, reset) in cases {
        std::fs::write(&path, bytes).unwrap();
        let (store, opened) = open(config);
        assert_eq!((opened.reset, opened.found.len()), (Some(reset), 0));
        assert!(opened.to_string().contains(&reset.to_string()), "{opened}");
        save(&store, 0..1);
        drop(store);
        let (store, opened) = open(config);
        assert_eq!((verified(&store, &opened), opened.reset), (vec![(0, 0)], None));
    }
}

#[test]
fn blocks_of_another_model_never_come_back() {
    let dir = TempDir::new("disk");
    let config = full_file(&dir);
    drop(open(&DiskConfig { fingerprint: [8; 32], ..config.clone() }));
    // The headers of the first model are still in the file, but are void.
    let (_, opened) = open(&config);
    assert_eq!((opened.reset, opened.found.len()), (Some(Reset::OtherModel), 0));
}

#[test]
fn files_of_others_are_left_alone() {
    let dir = TempDir::new("disk");
    let config = config(&dir, SLOTS);
    for text in ["x", "notes that somebody needs", &"long ".repeat(5000)] {
        std::fs::write(&config.path, text).unwrap();
        let error = Store::open(&config).unwrap_err();
        assert!(matches!(error, DiskError::Foreign { .. }), "{error}");
        assert_eq!(std::fs::read_to_string(&config.path).unwrap(), text);
    }
}

/// The fingerprint of a file for states has the secret of the file with their blocks.
#[test]
fn a_file_of_states_says_so() {
    let dir = TempDir::new("disk");
    let config = DiskConfig { kind: SlotKind::State, ..full_file(&dir) };
    let (store, opened) = open(&config);
    assert!(opened.to_string().contains("slots hold a state") && opened.reset.is_none(), "{opened}");
    drop(store);
    let (_, opened) = open(&DiskConfig { fingerprint: [8; 32], ..config });
    assert!(opened.to_string().contains("it belonged to another KV file"), "{opened}");
}
