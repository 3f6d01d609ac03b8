//! Slow and failing media.

use super::files::Media;
use super::format::{Entry, FirstPage, Geometry};
use super::*;
use pegainfer_testing::{Rng, seed};
use std::collections::HashMap;
use std::io::{Error, ErrorKind, Result};
use std::sync::{Arc, Mutex};

const SLOTS: u32 = 16;
const GEOMETRY: Geometry = Geometry { slot_bytes: 8192, header_bytes: 256, slots: SLOTS };
const EPOCH: u64 = 77;
const PAUSE: Duration = Duration::from_secs(1);

/// Decides the fate of a transfer: how many of its bytes are moved, or an error. The arguments are true for a write,
/// and the number of bytes.
type Fate = Box<dyn FnMut(bool, usize) -> Result<usize> + Send>;

/// A file in memory.
struct Medium {
    bytes: Mutex<Vec<u8>>,
    fate: Mutex<Fate>,
}

impl Medium {
    fn decide(&self, is_write: bool, len: usize) -> Result<usize> {
        (self.fate.lock().unwrap())(is_write, len)
    }

    fn set(&self, fate: impl FnMut(bool, usize) -> Result<usize> + Send + 'static) {
        *self.fate.lock().unwrap() = Box::new(fate);
    }

    /// What the header of `slot` says to the next process.
    fn entry(&self, slot: u32) -> Entry {
        let at = GEOMETRY.header_offset(slot) as usize;
        SlotHeader::decode(&self.bytes.lock().unwrap()[at..at + 256], EPOCH, slot)
    }
}

impl Media for Medium {
    fn read_at(&self, _: bool, offset: u64, out: &mut [u8]) -> Result<usize> {
        let count = self.decide(false, out.len())?;
        out[..count].copy_from_slice(&self.bytes.lock().unwrap()[offset as usize..][..count]);
        Ok(count)
    }

    fn write_at(&self, _: bool, offset: u64, bytes: &[u8]) -> Result<usize> {
        let count = self.decide(true, bytes.len())?;
        self.bytes.lock().unwrap()[offset as usize..][..count].copy_from_slice(&bytes[..count]);
        Ok(count)
    }
}

/// A store over a medium.
fn store(depth: usize, fate: impl FnMut(bool, usize) -> Result<usize> + Send + 'static) -> (Store, Arc<Medium>) {
    let bytes = Mutex::new(vec![0; GEOMETRY.file_bytes() as usize]);
    let medium = Arc::new(Medium { bytes, fate: Mutex::new(Box::new(fate)) });
    let config = DiskConfig::new("unused".as_ref(), 0, 8192, TOKENS, FINGERPRINT);
    let config = DiskConfig { depth, queue: 6, pause: PAUSE, ..config };
    let backend = backend::start_threads(&config, medium.clone(), GEOMETRY).unwrap();
    let page = FirstPage { geometry: GEOMETRY, epoch: EPOCH, fingerprint: FINGERPRINT, secret: [0; 32] };
    (DiskStore::new(backend, page, &config, 0), medium)
}

#[test]
fn random_faults_never_give_a_wrong_block() {
    let mut faults = Rng(seed());
    let (store, medium) = store(8, move |_, len| match faults.below(10) {
        0 => Err(ErrorKind::Interrupted.into()),
        1 => Err(Error::other("a fault")),
        2 => Ok(0),
        3..5 => Ok(1 + faults.below(len)),
        _ => Ok(len),
    });
    let mut rng = Rng(seed() + 1);
    // The blocks that slots hold for certain; after a failed write, a slot is in neither.
    let (mut held, mut pending, mut done) = (HashMap::new(), HashMap::new(), Vec::new());
    let mut latest = HashMap::new();
    let (mut succeeded, mut failed) = (0, 0);
    for ticket in 0..4000 {
        let slot = rng.below(SLOTS as usize) as u32;
        let accepted = match rng.below(3) {
            0 => read(&store, ticket, slot).map(|()| held.get(&slot).copied()),
            1 => store.erase(ticket, slot).map(|()| _ = held.remove(&slot)).map(|()| None),
            _ => write(&store, slot, ticket).map(|()| _ = held.remove(&slot)).map(|()| Some(ticket)),
        };
        match accepted {
            Ok(block) => {
                pending.insert(ticket, (slot, block));
                latest.insert(slot, ticket);
            }
            Err(refused) => {
                store.wait(&mut done, Duration::from_millis(u64::from(refused.reason == RefusedReason::Full)))
            }
        }
        store.poll(&mut done);
        for done in done.drain(..) {
            let (slot, block) = pending.remove(&done.ticket).expect("each ticket is done once");
            match (done.result, block) {
                (Err(failure), _) => {
                    failed += 1;
                    assert!(failure.to_string().contains(&format!("slot {slot} of the KV file")), "{failure}");
                }
                (Ok(()), Some(number)) if done.is_read => {
                    assert!(done.memory.unwrap().as_slice() == payload(number, 8192).as_slice());
                    succeeded += 1;
                }
                // Unless another job for the slot was accepted between the end of this one and now.
                (Ok(()), Some(number)) if latest[&slot] == number => _ = held.insert(slot, number),
                (Ok(()), _) => {}
            }
        }
    }
    wait(&store, pending.len());
    // One block is there for certain, once the pause after many faults is over.
    medium.set(|_, len| Ok(len));
    std::thread::sleep(PAUSE);
    save(&store, 0..1);
    drop(store);
    assert!(succeeded > 20 && failed > 100, "{succeeded} good reads, {failed} failures");
    let mut blocks = 0;
    for slot in 0..SLOTS {
        let Entry::Block { header, .. } = medium.entry(slot) else { continue };
        let at = GEOMETRY.payload_offset(slot) as usize;
        assert_eq!(checksum(&medium.bytes.lock().unwrap()[at..at + 8192]), header.checksum, "slot {slot}");
        blocks += 1;
    }
    assert!(blocks > 0);
}

#[test]
fn a_full_disk_fails_jobs_and_is_told() {
    let (store, medium) = store(2, |_, len| Ok(len));
    save(&store, 0..1);
    medium.set(|is_write, len| if is_write { Err(ErrorKind::StorageFull.into()) } else { Ok(len) });
    for failures in 1..=8 {
        write(&store, 1, failures).unwrap();
        let done = wait(&store, 1).remove(0);
        assert_eq!(done.result.unwrap_err().error.kind(), ErrorKind::StorageFull);
        assert!(done.memory.is_some());
        assert_eq!(store.is_failing(), failures == 8);
    }
    std::thread::sleep(PAUSE);
    assert!(!store.is_failing(), "it is worth a try");
    write(&store, 1, 9).unwrap();
    wait(&store, 1).remove(0).result.unwrap_err();
    assert!(store.is_failing(), "it failed again");
    assert!(load(&store, 0).as_slice() == payload(0, 8192).as_slice());
    assert!(!store.is_failing(), "a success ends it");
}

#[test]
fn a_block_that_could_not_be_written_is_not_in_the_file() {
    let (store, medium) = store(2, |_, len| Ok(len));
    save(&store, 0..1);
    assert!(matches!(medium.entry(0), Entry::Block { .. }));
    medium.set(|_, len| if len == 8192 { Err(ErrorKind::StorageFull.into()) } else { Ok(len) });
    write(&store, 0, 5).unwrap();
    wait(&store, 1).remove(0).result.unwrap_err();
    assert_eq!(medium.entry(0), Entry::Empty, "neither the new block nor the old one");
}

#[test]
fn a_slow_disk_delays_nobody_and_reads_come_first() {
    let (store, _) = store(2, |_, len| {
        std::thread::sleep(Duration::from_millis(20));
        Ok(len)
    });
    let begun = Instant::now();
    for slot in 0..6 {
        write(&store, slot, slot.into()).unwrap();
    }
    assert_eq!(write(&store, 6, 6).unwrap_err().reason, RefusedReason::Full);
    for slot in 0..3 {
        assert_eq!(read(&store, 100, slot).unwrap_err().reason, RefusedReason::Busy);
        read(&store, 100, 8 + slot).unwrap();
    }
    let mut done = Vec::new();
    store.poll(&mut done);
    assert!(begun.elapsed() < Duration::from_millis(250), "{:?}", begun.elapsed());
    let done = wait(&store, 9 - done.len()).into_iter().chain(done).collect::<Vec<_>>();
    let last_read = done.iter().filter(|done| done.is_read).map(|done| done.waited + done.took).max();
    let last_write = done.iter().filter(|done| !done.is_read).map(|done| done.waited + done.took).max();
    assert!(last_read < last_write, "{last_read:?} {last_write:?}");
    assert!(done.iter().filter(|done| !done.is_read).all(|done| done.took >= Duration::from_millis(60)));
}

#[test]
fn a_hanging_disk_does_not_hang_the_process() {
    let (release, hanging) = std::sync::mpsc::channel::<()>();
    let (store, _) = store(2, move |_, len| {
        _ = hanging.recv();
        Ok(len)
    });
    let store = store.with_closing(Duration::from_millis(100));
    for slot in 0..4 {
        write(&store, slot, slot.into()).unwrap();
    }
    let begun = Instant::now();
    drop(store);
    assert!(begun.elapsed() < Duration::from_secs(2));
    drop(release);
}
