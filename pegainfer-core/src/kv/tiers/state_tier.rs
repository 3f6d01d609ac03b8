//! The slots for states outside of KV blocks.

use super::index::{SlotIndex, TierBlock};
use super::transfer::BlockCopy;
use crate::kv::ContentName;
use crate::kv::disk::SlotHeader;
use std::collections::VecDeque;

/// Number of blocks before a state among which the one before it is looked for.
const MAX_BLOCKS_BETWEEN: usize = 1024;

/// The slots for states of a model that has such. A state has the name of the last block before it.
#[derive(Debug)]
pub(super) struct StateTier {
    pub host: SlotIndex,
    pub disk: Option<SlotIndex>,
    /// Number of blocks that a state is as large as.
    pub as_blocks: usize,
    /// For each slot of the host, true if a sequence resumed from its state, or computed it again.
    used_again: Vec<bool>,
    /// Slots of the host whose states are to be written to the disk, and their names.
    unwritten: VecDeque<(u32, ContentName)>,
}

impl StateTier {
    /// `slots` empty slots of the host for states after blocks of `block_tokens` tokens.
    pub fn new(slots: usize, block_tokens: usize, as_blocks: usize) -> Self {
        let (host, used_again) = (SlotIndex::new(slots, block_tokens), vec![false; slots]);
        Self { host, disk: None, as_blocks, used_again, unwritten: VecDeque::new() }
    }

    /// Marks the state after this block as used again; returns its slot of the host, if it has one.
    pub fn mark_used(&mut self, name: ContentName) -> Option<u32> {
        let slot = self.host.slot_of(name)?;
        self.host.touch(slot);
        self.host.set_spare(slot, false);
        self.used_again[slot as usize] = true;
        Some(slot)
    }

    /// A state after the last of these blocks, within a prompt, has got a slot. A conversation goes on there: the state
    /// before it is spare unless it was used again.
    pub fn supersede(&mut self, blocks: &[ContentName]) {
        let before = blocks.iter().rev().skip(1).take(MAX_BLOCKS_BETWEEN);
        if let Some(slot) = before.filter_map(|name| self.host.slot_of(*name)).next() {
            self.host.set_spare(slot, !self.used_again[slot as usize]);
        }
    }

    /// Takes a slot of the host for the state after this block. It stands for itself: it has no parent.
    pub fn insert(&mut self, block: TierBlock<'_>) -> Option<u32> {
        let (slot, _) = self.host.insert(TierBlock { parent: None, ..block })?;
        self.used_again[slot as usize] = false;
        Some(slot)
    }

    /// The state of this slot of the host is to be written, unless too many are.
    pub fn add_unwritten(&mut self, slot: u32) {
        if let Some(name) = self.host.name(slot).filter(|_| self.unwritten.len() < self.host.total()) {
            self.unwritten.push_back((slot, name));
        }
    }

    /// The next state to be written, with slots that are pinned for that. `blocks`: the blocks on the disk, without
    /// which nobody finds it. If the disk is full, only states that were used again take the place of others.
    pub fn next_write(&mut self, blocks: &SlotIndex) -> Option<(BlockCopy, SlotHeader)> {
        let disk = self.disk.as_mut()?;
        while let Some((slot, name)) = self.unwritten.pop_front() {
            // Another state may have the slot by now.
            let Some(header) = self.host.header(slot).filter(|header| header.name == name) else { continue };
            let has_place = self.used_again[slot as usize] || disk.has_empty();
            // Blocks of adapters are never on the disk, and so are their states.
            if disk.knows(name) || !blocks.knows(name) || !has_place {
                continue;
            }
            let block = TierBlock { name, parent: None, tokens: &header.tokens, root: self.host.root(slot) };
            let Some((block, _)) = disk.insert(block) else { continue };
            self.host.pin(slot);
            return Some((BlockCopy { block, slot }, header));
        }
        None
    }

    /// Forgets all states but those on the disk, whose slots are returned.
    pub fn clear(&mut self) -> Vec<u32> {
        self.host.clear();
        self.unwritten.clear();
        self.disk.as_ref().map(SlotIndex::known).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{Naming, PrefixRoot};

    #[test]
    fn states_in_the_middle_of_a_text_go_before_older_ones_at_the_end_of_others() {
        let (naming, root) = (Naming::new(&[1; 32], "a model"), PrefixRoot::default());
        let name = |parent: Option<ContentName>, token: u32| {
            naming.next(parent.unwrap_or_else(|| naming.root(root)), &[token; 16], &[])
        };
        let mut states = StateTier::new(4, 16, 1);
        let mut put = |names: &[ContentName], token: u32| {
            let block = TierBlock { name: names[names.len() - 1], parent: None, tokens: &[token; 16], root: None };
            let slot = states.insert(block).unwrap();
            states.host.fill(slot, 0);
            states.supersede(names);
            names.iter().map(|name| states.host.knows(*name)).collect::<Vec<_>>()
        };
        let (other, first) = (name(None, 1), name(None, 2));
        let (second, third) = (name(Some(first), 3), name(Some(first), 4));
        put(&[other], 1);
        put(&[first], 2);
        assert_eq!(put(&[first, second], 3), [true, true]);
        let fourth = name(Some(second), 5);
        assert_eq!(put(&[first, second, fourth], 5), [true, true, true]);
        // The slots are full. What lies in the middle goes first, then the oldest.
        assert_eq!(put(&[first, third], 4), [false, true]);
        assert_eq!(put(&[name(None, 6)], 6), [true]);
        assert!(states.host.knows(other) && states.host.knows(fourth) && !states.host.knows(second));
        // One that was used again is as good as one at the end.
        let mut states = StateTier::new(2, 16, 1);
        let mut put = |names: &[ContentName], token: u32| {
            let block = TierBlock { name: names[names.len() - 1], parent: None, tokens: &[token; 16], root: None };
            let slot = states.insert(block).unwrap();
            states.host.fill(slot, 0);
            states.mark_used(first);
            states.supersede(names);
        };
        put(&[first], 2);
        put(&[first, second], 3);
        put(&[other], 1);
        assert!(states.host.knows(first) && states.host.knows(other));
    }
}
