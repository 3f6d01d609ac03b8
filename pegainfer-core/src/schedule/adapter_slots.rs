//! The slots of a device that hold adapters.
//!
//! A step takes rows of as many distinct adapters as there are slots. A sequence runs with its adapter in a slot, and the
//! slot keeps it until the last of these sequences has left. Slots that no sequence uses keep their adapters, too, and the
//! least recently used one gives way. Uses are counted from the running sequences, so no slot can leak.

use crate::adapter::AdapterId;

/// Steps for which requests with adapters may pass one that waits for a slot. After these, they wait behind it until a
/// slot is free: running sequences end, so every request gets a slot. Requests without an adapter need none and go on.
pub(super) const PATIENCE: u64 = 64;

/// Which adapter each slot holds.
#[derive(Debug)]
pub(super) struct AdapterSlots {
    slots: Vec<Slot>,
    /// Number of times that a slot was taken.
    taken: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    adapter: Option<AdapterId>,
    /// Value of `taken` when it was last taken.
    last: u64,
}

/// Slots that running sequences use.
#[derive(Debug)]
pub(super) struct UsedSlots(Vec<bool>);

impl AdapterSlots {
    /// `count` empty slots.
    pub fn new(count: usize) -> Self {
        Self { slots: vec![Slot::default(); count], taken: 0 }
    }

    /// True if there are any.
    pub fn any(&self) -> bool {
        !self.slots.is_empty()
    }

    /// The slots that sequences use: `running` has the slot of each one with an adapter.
    pub fn used(&self, running: impl Iterator<Item = u32>) -> UsedSlots {
        let mut used = vec![false; self.slots.len()];
        running.for_each(|slot| used[slot as usize] = true);
        UsedSlots(used)
    }

    /// True if a sequence with this adapter can run.
    pub fn has_room(&self, adapter: AdapterId, used: &UsedSlots) -> bool {
        let mut slots = self.slots.iter().zip(&used.0);
        slots.any(|(slot, used)| !used || slot.adapter == Some(adapter))
    }

    /// Takes the slot that holds this adapter, or else the one that was not used for the longest time.
    pub fn take(&mut self, adapter: AdapterId, used: &UsedSlots) -> Option<u32> {
        let slots = || self.slots.iter().zip(&used.0).enumerate();
        let held = slots().find(|(_, (slot, _))| slot.adapter == Some(adapter));
        let oldest = || slots().filter(|(_, (_, used))| !**used).min_by_key(|(_, (slot, _))| slot.last);
        let (place, _) = held.or_else(oldest)?;
        self.taken += 1;
        self.slots[place] = Slot { adapter: Some(adapter), last: self.taken };
        Some(place as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU32;

    fn id(i: u32) -> AdapterId {
        AdapterId(NonZeroU32::new(i).unwrap())
    }

    #[test]
    fn the_least_recently_used_slot_gives_way() {
        let mut slots = AdapterSlots::new(2);
        let none = slots.used(std::iter::empty());
        assert_eq!([1, 2, 1].map(|i| slots.take(id(i), &none)), [Some(0), Some(1), Some(0)]);
        assert_eq!(slots.take(id(3), &none), Some(1), "1 was used after 2");
        assert_eq!(slots.take(id(1), &none), Some(0), "it is still there");
    }

    #[test]
    fn a_used_slot_keeps_its_adapter() {
        let mut slots = AdapterSlots::new(2);
        let none = slots.used(std::iter::empty());
        assert_eq!([1, 2].map(|i| slots.take(id(i), &none)), [Some(0), Some(1)]);
        let first = slots.used([0, 0].into_iter());
        assert_eq!(slots.take(id(3), &first), Some(1), "1 is older, and in use");
        let both = slots.used([0, 1].into_iter());
        assert!(!slots.has_room(id(2), &both) && slots.has_room(id(3), &both));
        assert_eq!((slots.take(id(2), &both), slots.take(id(1), &both)), (None, Some(0)));
    }

    #[test]
    fn without_slots_there_is_no_room() {
        let mut slots = AdapterSlots::new(0);
        let used = slots.used(std::iter::empty());
        assert!(!slots.any() && !slots.has_room(id(1), &used) && slots.take(id(1), &used).is_none());
    }
}
