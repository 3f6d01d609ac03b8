//! The slots for states outside of KV blocks.

use super::index::{SlotIndex, TierBlock};
use super::transfer::BlockCopy;
use crate::kv::ContentName;
use crate::kv::disk::SlotHeader;
use std::collections::VecDeque;

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
        self.used_again[slot as usize] = true;
        Some(slot)
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
