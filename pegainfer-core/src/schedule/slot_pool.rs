//! The pool of state slots: free ones, ones held by sequences, and ones with snapshots.

use crate::kv::tiers::KeptState;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The state slots of an engine. Clones are handles to the same pool. All operations take at most logarithmic time in
/// the number of slots.
#[derive(Debug, Clone)]
pub(super) struct SlotPool(Arc<Mutex<Slots>>);

/// A reference to a slot. When the last one is dropped, the slot becomes free, or idle if it has a snapshot.
#[derive(Debug)]
pub struct SlotRef {
    id: u32,
    pool: SlotPool,
}

#[derive(Debug)]
struct Slots {
    slots: Vec<Slot>,
    /// Slots without holders and snapshots.
    free: Vec<u32>,
    /// Slots with a snapshot, by the name of its prefix, see `BlockTable::prefix`.
    snapshots: HashMap<u64, u32>,
    /// Slots with a snapshot and no holder, in the order of their eviction.
    idle: BTreeMap<Order, u32>,
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
    /// Time of creation or last use.
    used: u64,
    /// True if a sequence resumed from it, or is expected to.
    is_wanted: bool,
    /// True if it is evicted before those that are not.
    is_spare: bool,
}

/// Place in the order of evictions: spare snapshots first, then by the time of their last use.
type Order = (bool, u64);

impl Snapshot {
    fn order(&self) -> Order {
        (!self.is_spare, self.used)
    }
}

impl Slots {
    /// Removes the snapshot of a slot, which is no longer idle.
    fn drop_snapshot(&mut self, id: u32) {
        if let Some(snapshot) = self.slots[id as usize].snapshot.take() {
            self.snapshots.remove(&snapshot.prefix);
            self.idle.remove(&snapshot.order());
        }
    }

    /// The slot with the snapshot of `prefix`, marked as most recently used and removed from the idle ones.
    fn touch(&mut self, prefix: u64) -> Option<u32> {
        let id = *self.snapshots.get(&prefix)?;
        self.clock += 1;
        if let Some(snapshot) = &mut self.slots[id as usize].snapshot {
            self.idle.remove(&snapshot.order());
            snapshot.used = self.clock;
        }
        Some(id)
    }

    /// A sequence resumes from the snapshot of a slot that is not idle, or is expected to.
    fn want(&mut self, id: u32) {
        if let Some(snapshot) = &mut self.slots[id as usize].snapshot {
            (snapshot.is_wanted, snapshot.is_spare) = (true, false);
        }
    }

    /// Makes a slot free or idle if it has no holder.
    fn release(&mut self, id: u32) {
        match &self.slots[id as usize] {
            Slot { holders: 0, snapshot: Some(snapshot) } => drop(self.idle.insert(snapshot.order(), id)),
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

    /// A slot of undefined contents, if necessary that of an idle snapshot: a spare one, or the least recently used.
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
        slots.want(id);
        slots.slots[id as usize].holders += 1;
        Some(SlotRef { id, pool: self.clone() })
    }

    /// True if there is a snapshot of a prefix; does not count as a use.
    pub fn has(&self, prefix: u64) -> bool {
        self.lock().snapshots.contains_key(&prefix)
    }

    /// Keeps the state in `slot` as the snapshot of `prefix`. An existing snapshot has the same bits and stays.
    pub fn add_snapshot(&self, prefix: u64, slot: &SlotRef) {
        let slots = &mut *self.lock();
        match slots.touch(prefix) {
            Some(id) => slots.release(id),
            None => {
                slots.clock += 1;
                slots.drop_snapshot(slot.id);
                let snapshot = Snapshot { prefix, used: slots.clock, is_wanted: false, is_spare: false };
                slots.slots[slot.id as usize].snapshot = Some(snapshot);
                slots.snapshots.insert(prefix, slot.id);
            }
        }
    }

    /// The snapshot in `slot`, which the caller holds, is as good as one from which a sequence resumed.
    pub fn want(&self, slot: &SlotRef) {
        self.lock().want(slot.id);
    }

    /// A later snapshot of the same text was made: the one of this prefix is spare, unless a sequence resumed from it.
    pub fn supersede(&self, prefix: u64) {
        let slots = &mut *self.lock();
        let Some(&id) = slots.snapshots.get(&prefix) else { return };
        let Some(snapshot) = &mut slots.slots[id as usize].snapshot else { return };
        let was_idle = slots.idle.remove(&snapshot.order()).is_some();
        snapshot.is_spare = !snapshot.is_wanted;
        if was_idle {
            slots.idle.insert(snapshot.order(), id);
        }
    }

    /// Removes all snapshots.
    pub fn clear(&self) {
        let slots = &mut *self.lock();
        slots.snapshots.clear();
        // In id order, because the order of a hash map is random: a replayed schedule must hand out the same slots.
        for id in (0..slots.slots.len() as u32).rev() {
            if slots.slots[id as usize].snapshot.take().is_some() {
                slots.release(id);
            }
        }
        slots.idle.clear();
    }

    /// Number of slots that can be allocated now.
    pub fn available(&self) -> usize {
        let slots = self.lock();
        slots.free.len() + slots.idle.len()
    }

    /// Number of snapshots.
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

    /// Number of holders, and true if the slot has a snapshot.
    pub fn holders_and_snapshot(&self) -> (usize, bool) {
        let slot = &self.pool.lock().slots[self.id as usize];
        (slot.holders, slot.snapshot.is_some())
    }

    /// Drops its snapshot, if it has one.
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
impl KeptState for SlotRef {
    fn slot(&self) -> u32 {
        self.id
    }
}
