//! The pool of state slots: which are free, which a sequence holds, and which keep a snapshot.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The state slots of an engine. Clones are handles to the same pool; no operation depends on the number of slots by more
/// than its logarithm.
#[derive(Debug, Clone)]
pub(super) struct SlotPool(Arc<Mutex<Slots>>);

/// A hold on a slot. When the last one is dropped, the slot is free, or its snapshot is idle: kept until its slot is wanted.
#[derive(Debug)]
pub(super) struct SlotRef {
    id: u32,
    pool: SlotPool,
}

#[derive(Debug)]
struct Slots {
    slots: Vec<Slot>,
    /// Neither held nor with a snapshot.
    free: Vec<u32>,
    /// Slots with a snapshot, by the name of its prefix, see `BlockTable::prefix`.
    snapshots: HashMap<u64, u32>,
    /// Slots with a snapshot that nobody holds, least recently used first.
    idle: BTreeMap<u64, u32>,
    clock: u64,
}

#[derive(Debug, Default)]
struct Slot {
    holders: usize,
    snapshot: Option<Snapshot>,
}

#[derive(Debug)]
struct Snapshot {
    prefix: u64,
    /// When it was made or found last; its key among the idle ones.
    used: u64,
}

impl Slots {
    /// Takes the snapshot out of a slot, which is not idle any more.
    fn drop_snapshot(&mut self, id: u32) {
        if let Some(snapshot) = self.slots[id as usize].snapshot.take() {
            self.snapshots.remove(&snapshot.prefix);
            self.idle.remove(&snapshot.used);
        }
    }

    /// The slot with the snapshot of `prefix`, which becomes the most recently used one; it is not among the idle ones.
    fn touch(&mut self, prefix: u64) -> Option<u32> {
        let id = *self.snapshots.get(&prefix)?;
        self.clock += 1;
        if let Some(snapshot) = &mut self.slots[id as usize].snapshot {
            self.idle.remove(&snapshot.used);
            snapshot.used = self.clock;
        }
        Some(id)
    }

    /// Puts a slot that nobody holds where it belongs.
    fn release(&mut self, id: u32) {
        match &self.slots[id as usize] {
            Slot { holders: 0, snapshot: Some(snapshot) } => drop(self.idle.insert(snapshot.used, id)),
            Slot { holders: 0, snapshot: None } => self.free.push(id),
            _ => {}
        }
    }
}

impl SlotPool {
    /// A pool of `slots` free slots.
    pub fn new(slots: usize) -> Self {
        let slots = Slots {
            slots: (0..slots).map(|_| Slot::default()).collect(),
            // Popped from the end: hand out low ids first.
            free: (0..slots as u32).rev().collect(),
            snapshots: HashMap::new(),
            idle: BTreeMap::new(),
            clock: 0,
        };
        Self(Arc::new(Mutex::new(slots)))
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        // No user code runs under the lock, so a poisoned pool is still consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A slot of undefined contents, if need be that of the least recently used snapshot that nobody holds.
    pub fn allocate(&self) -> Option<SlotRef> {
        let slots = &mut *self.lock();
        let id = match slots.free.pop() {
            Some(id) => id,
            None => {
                let (_, &id) = slots.idle.first_key_value()?;
                slots.drop_snapshot(id);
                id
            }
        };
        slots.slots[id as usize].holders = 1;
        Some(SlotRef { id, pool: self.clone() })
    }

    /// The snapshot of a prefix.
    pub fn find(&self, prefix: u64) -> Option<SlotRef> {
        let slots = &mut *self.lock();
        let id = slots.touch(prefix)?;
        slots.slots[id as usize].holders += 1;
        Some(SlotRef { id, pool: self.clone() })
    }

    /// Keeps what is in `slot` as the snapshot of `prefix`. Where there is one already, it has the same bits and stays.
    pub fn keep(&self, prefix: u64, slot: &SlotRef) {
        let slots = &mut *self.lock();
        match slots.touch(prefix) {
            Some(id) => slots.release(id),
            None => {
                slots.clock += 1;
                slots.drop_snapshot(slot.id);
                slots.slots[slot.id as usize].snapshot = Some(Snapshot { prefix, used: slots.clock });
                slots.snapshots.insert(prefix, slot.id);
            }
        }
    }

    /// Forgets every snapshot.
    pub fn clear(&self) {
        let slots = &mut *self.lock();
        slots.snapshots.clear();
        // Not in the order of a hash map, which is random: a recorded schedule hands out the same slots when it is replayed.
        for id in (0..slots.slots.len() as u32).rev() {
            if slots.slots[id as usize].snapshot.take().is_some() {
                slots.release(id);
            }
        }
        slots.idle.clear();
    }

    /// Slots that can be had now.
    pub fn available(&self) -> usize {
        let slots = self.lock();
        slots.free.len() + slots.idle.len()
    }

    /// Snapshots that are kept now.
    pub fn snapshots(&self) -> usize {
        self.lock().snapshots.len()
    }

    /// Checks the bookkeeping; for tests.
    pub fn check(&self) -> Result<(), String> {
        let slots = self.lock();
        let count = |matches: fn(&Slot) -> bool| slots.slots.iter().filter(|slot| matches(slot)).count();
        let idle = count(|slot| slot.holders == 0 && slot.snapshot.is_some());
        let free = count(|slot| slot.holders == 0 && slot.snapshot.is_none());
        let kept = count(|slot| slot.snapshot.is_some());
        let (expected, found) = ((free, idle, kept), (slots.free.len(), slots.idle.len(), slots.snapshots.len()));
        if expected == found {
            Ok(())
        } else {
            Err(format!("free, idle, kept: {expected:?}, but {found:?} are listed"))
        }
    }
}

impl SlotRef {
    /// Index of the slot in the model's state.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// How often it is held, and whether it has a snapshot.
    pub fn uses(&self) -> (usize, bool) {
        let slot = &self.pool.lock().slots[self.id as usize];
        (slot.holders, slot.snapshot.is_some())
    }

    /// Gives up its snapshot, if it has one.
    pub fn drop_snapshot(&self) {
        self.pool.lock().drop_snapshot(self.id);
    }
}

impl Clone for SlotRef {
    fn clone(&self) -> Self {
        self.pool.lock().slots[self.id as usize].holders += 1;
        Self { id: self.id, pool: self.pool.clone() }
    }
}

impl Drop for SlotRef {
    fn drop(&mut self) {
        let slots = &mut *self.pool.lock();
        slots.slots[self.id as usize].holders -= 1;
        slots.release(self.id);
    }
}
