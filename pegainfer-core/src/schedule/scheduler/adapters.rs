//! Which waiting requests can run with their adapters.

use super::Scheduler;
use super::running::Running;
use crate::schedule::adapter_slots::{AdapterSlots, PATIENCE, UsedSlots};
use crate::schedule::sequence::Sequence;
use crate::schedule::state::SequenceState;

/// Tells of waiting requests, one after the other from the front of the queue, whether they can have a slot.
pub(super) struct SlotQueue<'a> {
    /// The slots, and those in use; `None` if the engine has no slots.
    slots: Option<(&'a AdapterSlots, UsedSlots)>,
    now: u64,
    /// True after a request that has waited for too long.
    closed: bool,
}

impl SlotQueue<'_> {
    /// True if the next request needs no slot, or can have one.
    pub fn admits<L: Default>(&mut self, seq: &Sequence<L>) -> bool {
        let Some(adapter) = seq.adapter() else { return true };
        let Some((slots, used)) = &self.slots else { return false };
        let admits = !self.closed && slots.has_room(adapter, used);
        self.closed |= !admits && seq.no_slot_since.is_some_and(|since| self.now >= since + PATIENCE);
        admits
    }
}

impl<S: SequenceState> Scheduler<S> {
    /// The waiting requests' slots, from the front of the queue.
    pub(super) fn slot_queue(&self) -> SlotQueue<'_> {
        let slots = self.adapters.any().then(|| (&self.adapters, self.used_slots()));
        SlotQueue { slots, now: self.stats.steps, closed: false }
    }

    fn used_slots(&self) -> UsedSlots {
        self.adapters.used(self.running.iter().filter_map(|seq| seq.adapter_slot))
    }

    /// Notes since when requests wait for a slot of their adapters.
    pub(super) fn note_missing_slots(&mut self) {
        if !self.adapters.any() {
            return;
        }
        let used = self.used_slots();
        for seq in &mut self.waiting {
            if seq.adapter().is_some_and(|adapter| !self.adapters.has_room(adapter, &used)) {
                seq.no_slot_since.get_or_insert(self.stats.steps);
            }
        }
    }
}

/// Takes one of the slots for `seq`; `None` if none is left. A sequence without an adapter takes none.
pub(super) fn take_slot<L: Default>(
    slots: &mut AdapterSlots,
    running: &Running<L>,
    seq: &Sequence<L>,
) -> Option<Option<u32>> {
    let Some(adapter) = seq.adapter() else { return Some(None) };
    let used = slots.used(running.iter().filter_map(|seq| seq.adapter_slot));
    slots.take(adapter, &used).map(Some)
}
