//! Blocks that the host tier copies to the disk, and their return.

use super::in_flight::{InFlight, Read};
use super::index::{SlotIndex, TierBlock};
use super::kept::KeptState;
use super::tiers::Tiers;
use super::transfer::{BlockCopy, Direction, Transfer, TransferDone};
use crate::kv::{ContentName, Medium};

/// Maximum number of blocks that are being written.
const MAX_WRITES: usize = 64;

impl<K: KeptState> Tiers<K> {
    /// Starts to write the blocks of these slots of the host that the disk does not have, now or when earlier ones are
    /// written. If it is full, only blocks that were used again (`again`) take the place of others, so that it is not
    /// worn by texts that nobody asks for twice.
    pub(super) fn write(&mut self, slots: &[u32], again: bool) {
        let Some(disk) = &mut self.disk else { return };
        for &slot in slots {
            // The next start gives the numbers of adapters to others.
            let outlives = self.host.root(slot).is_some_and(|root| root.adapter.is_none());
            let Some(name) = self.host.name(slot).filter(|_| outlives) else { continue };
            if let Some(block) = disk.slot_of(name) {
                disk.touch(block);
            } else if self.unwritten.len() < self.host.total() {
                self.unwritten.push_back((slot, name, again));
            }
        }
        self.write_more();
    }

    fn write_more(&mut self) {
        let most = MAX_WRITES.saturating_sub(self.writing());
        let Some(disk) = &mut self.disk else { return };
        let (mut copies, mut headers, mut gone) = (Vec::new(), Vec::new(), Vec::new());
        while copies.len() < most
            && let Some((slot, name, again)) = self.unwritten.pop_front()
        {
            // Another block may have the slot by now.
            let Some(header) = self.host.header(slot).filter(|header| header.name == name) else { continue };
            if disk.knows(name) || !(again || disk.has_empty()) {
                continue;
            }
            let block = TierBlock { name, parent: header.parent, tokens: &header.tokens, root: self.host.root(slot) };
            let Some((block, evicted)) = disk.insert(block) else { continue };
            gone.extend(evicted);
            self.host.pin(slot);
            copies.push(BlockCopy { block, slot });
            headers.push(header);
        }
        // States are of no use without the blocks before them.
        self.erase_states_of(&gone);
        self.tell_removed(Medium::Disk, gone);
        if !copies.is_empty() {
            let transfer = Transfer { headers, ..Transfer::new(Direction::Write, copies.clone()) };
            self.start(transfer, InFlight::Write { copies });
        }
    }

    pub(super) fn finish_write(&mut self, copies: &[BlockCopy], done: &TransferDone) {
        let Some(disk) = &mut self.disk else { return };
        for copy in copies {
            match self.host.checksum(copy.slot).filter(|_| done.result.is_ok()) {
                Some(checksum) => disk.fill(copy.block, checksum),
                None => disk.abandon(copy.block),
            }
            self.host.unpin(copy.slot);
        }
        if done.result.is_ok() {
            self.stats.written_blocks += copies.len() as u64;
            // Some may have been forgotten meanwhile.
            let is_there = |copy: &&BlockCopy| disk.name(copy.block).is_some();
            let there: Vec<BlockCopy> = copies.iter().filter(is_there).copied().collect();
            let names: Vec<ContentName> = there.iter().filter_map(|copy| disk.name(copy.block)).collect();
            self.tell_stored(Medium::Disk, &slots_of(&there));
            self.write_states_of(&names);
        }
        self.write_more();
    }

    /// What was read counts as stored on the host; its checksum is compared when it is loaded.
    pub(super) fn finish_read(&mut self, Read { blocks, states, work, .. }: &Read, done: &TransferDone) {
        let Some(disk) = &mut self.disk else { return };
        for copy in blocks {
            match disk.checksum(copy.block).filter(|_| done.result.is_ok()) {
                Some(checksum) => self.host.fill(copy.slot, checksum),
                None => self.host.abandon(copy.slot),
            }
            disk.unpin(copy.block);
        }
        self.finish_state_read(states, done);
        if done.result.is_ok() {
            self.tell_stored(Medium::Host, &slots_of(blocks));
            self.rates.read(*work, done.took);
            self.stats.read_blocks += blocks.len() as u64;
            self.stats.read_nanos += done.took.as_nanos() as u64;
        }
    }

    /// Nobody finds the blocks of these slots of the disk any more, nor does the next start.
    pub(super) fn erase(&mut self, slots: Vec<u32>) {
        let Some(disk) = self.disk.as_mut().filter(|_| !slots.is_empty()) else { return };
        let blocks = forget_pinned(disk, &slots);
        self.start(Transfer::new(Direction::Erase, blocks), InFlight::Erase { slots });
    }

    pub(super) fn finish_erase(&mut self, slots: &[u32]) {
        if let Some(disk) = &mut self.disk {
            slots.iter().for_each(|slot| disk.unpin(*slot));
        }
    }

    /// Number of blocks that are being written.
    fn writing(&self) -> usize {
        let blocks = |kind: &InFlight<K>| if let InFlight::Write { copies } = kind { copies.len() } else { 0 };
        self.in_flight.values().map(blocks).sum()
    }
}

/// Forgets what these slots of a disk hold, and pins them until they are erased; returns the copies of the erasure.
pub(super) fn forget_pinned(disk: &mut SlotIndex, slots: &[u32]) -> Vec<BlockCopy> {
    for &slot in slots {
        disk.pin(slot);
        disk.forget(slot);
    }
    slots.iter().map(|&block| BlockCopy { block, slot: 0 }).collect()
}

/// Slots of the host.
fn slots_of(copies: &[BlockCopy]) -> Vec<u32> {
    copies.iter().map(|copy| copy.slot).collect()
}
