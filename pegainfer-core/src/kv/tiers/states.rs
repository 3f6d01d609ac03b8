//! States outside of KV blocks: their copies on the host and on the disk.
//!
//! A state is written once the block before it is on the disk, and leaves the disk with that block.

use super::disk::forget_pinned;
use super::in_flight::{InFlight, Load};
use super::index::{SlotIndex, TierBlock};
use super::kept::KeptState;
use super::state_tier::StateTier;
use super::tiers::Tiers;
use super::transfer::{BlockCopy, Direction, Transfer, TransferDone};
use crate::kv::disk::SlotHeader;
use crate::kv::{BlockTable, ContentName, PrefixRoot};

/// Maximum number of states that are being written. A state is as large as many blocks.
const MAX_STATE_WRITES: usize = 2;

impl<K: KeptState> Tiers<K> {
    /// For a model with state outside of KV blocks: `slots` empty slots of `state_bytes` bytes for states.
    pub fn use_states(&mut self, slots: usize, state_bytes: usize) {
        let as_blocks = state_bytes.div_ceil(self.stats.slot_bytes.max(1));
        self.states = Some(StateTier::new(slots, self.pool.block_tokens(), as_blocks));
        (self.stats.state_slots, self.stats.state_bytes) = (slots, state_bytes);
    }

    /// Also uses a disk for states, after [`use_states`](Self::use_states) and [`use_disk`](Self::use_disk): one with
    /// `slots` slots, some of which hold states that are named like the blocks on the disk.
    pub fn use_state_disk(&mut self, slots: usize, found: impl IntoIterator<Item = (u32, SlotHeader)>) {
        let Some(states) = &mut self.states else { return };
        states.disk = Some(SlotIndex::restored(slots, self.pool.block_tokens(), found));
        self.stats.state_disk_slots = slots;
    }

    /// Starts to store states of a sequence that no slot has, each after a number of its `tokens`, of which the first
    /// `prompt_len` are its prompt.
    pub fn offer_states(&mut self, table: &BlockTable, tokens: &[u32], prompt_len: usize, new: Vec<(usize, K)>) {
        let size = self.pool.block_tokens();
        let Some(states) = &mut self.states else { return };
        let (mut copies, mut slots, mut held, mut again) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (end, state) in new {
            let Some(block) = last_block(table, tokens, end) else { continue };
            if let Some(slot) = states.mark_used(block.name) {
                again.push(slot);
                continue;
            }
            let Some(slot) = states.insert(block) else { continue };
            // The next turn of a conversation may go on from the end of the prompt, without what was generated.
            if end <= prompt_len {
                states.supersede(&table.names()[..end / size]);
            }
            copies.push(BlockCopy { block: state.slot(), slot });
            slots.push(slot);
            held.push(state);
        }
        if !copies.is_empty() {
            let transfer = Transfer { states: copies, ..Transfer::new(Direction::Store, Vec::new()) };
            self.start(transfer, InFlight::StoreStates { held, slots });
        }
        self.write_states(&again);
    }

    /// A sequence resumed after the first `end` of its `tokens`: the state there is worth a place on the disk.
    pub fn resumed(&mut self, table: &BlockTable, tokens: &[u32], end: usize) {
        let Some(states) = &mut self.states else { return };
        let Some(TierBlock { name, .. }) = last_block(table, tokens, end) else { return };
        if let Some(disk) = &mut states.disk
            && let Some(slot) = disk.slot_of(name)
        {
            disk.touch(slot);
        }
        if let Some(slot) = states.mark_used(name) {
            self.write_states(&[slot]);
        }
    }

    pub(super) fn finish_states(&mut self, slots: &[u32], done: &TransferDone) {
        let Some(states) = &mut self.states else { return };
        match &done.result {
            Ok(checksums) => {
                slots.iter().zip(checksums).for_each(|(slot, checksum)| states.host.fill(*slot, *checksum));
                self.stats.stored_states += slots.len() as u64;
                self.write_states(slots);
            }
            Err(_) => slots.iter().for_each(|slot| states.host.abandon(*slot)),
        }
    }

    /// Starts to write the states of these slots of the host that the disk does not have, now or when earlier ones are
    /// written.
    fn write_states(&mut self, slots: &[u32]) {
        let Some(states) = self.states.as_mut().filter(|states| states.disk.is_some()) else { return };
        slots.iter().for_each(|slot| states.add_unwritten(*slot));
        self.write_more_states();
    }

    /// Starts to write the states after these blocks, which are on the disk now.
    pub(super) fn write_states_of(&mut self, names: &[ContentName]) {
        let Some(states) = &self.states else { return };
        let slots: Vec<u32> = names.iter().filter_map(|name| states.host.slot_of(*name)).collect();
        self.write_states(&slots);
    }

    fn write_more_states(&mut self) {
        let most = MAX_STATE_WRITES.saturating_sub(self.writing_states());
        let (Some(blocks), Some(states)) = (&self.disk, &mut self.states) else { return };
        let writes = std::iter::from_fn(|| states.next_write(blocks));
        let (copies, headers): (Vec<_>, Vec<_>) = writes.take(most).unzip();
        if !copies.is_empty() {
            let transfer = Transfer { states: copies.clone(), headers, ..Transfer::new(Direction::Write, Vec::new()) };
            self.start(transfer, InFlight::WriteStates { copies });
        }
    }

    pub(super) fn finish_state_write(&mut self, copies: &[BlockCopy], done: &TransferDone) {
        let Some(StateTier { host, disk: Some(disk), .. }) = &mut self.states else { return };
        for copy in copies {
            match host.checksum(copy.slot).filter(|_| done.result.is_ok()) {
                Some(checksum) => disk.fill(copy.block, checksum),
                None => disk.abandon(copy.block),
            }
            host.unpin(copy.slot);
        }
        if done.result.is_ok() {
            self.stats.written_states += copies.len() as u64;
        }
        self.write_more_states();
    }

    /// States that were read count as stored on the host, like blocks.
    pub(super) fn finish_state_read(&mut self, copies: &[BlockCopy], done: &TransferDone) {
        let Some(StateTier { host, disk: Some(disk), .. }) = &mut self.states else { return };
        for copy in copies {
            match disk.checksum(copy.block).filter(|_| done.result.is_ok()) {
                Some(checksum) => host.fill(copy.slot, checksum),
                None => host.abandon(copy.slot),
            }
            disk.unpin(copy.block);
        }
        if done.result.is_ok() {
            self.stats.read_states += copies.len() as u64;
        }
    }

    /// Erases the states after these blocks, which have left the disk.
    pub(super) fn erase_states_of(&mut self, names: &[ContentName]) {
        let Some(StateTier { disk: Some(disk), .. }) = &self.states else { return };
        self.erase_states(names.iter().filter_map(|name| disk.slot_of(*name)).collect());
    }

    /// Nobody finds the states of these slots of the disk any more, nor does the next start.
    pub(super) fn erase_states(&mut self, slots: Vec<u32>) {
        let Some(StateTier { disk: Some(disk), .. }) = &mut self.states else { return };
        if slots.is_empty() {
            return;
        }
        let states = forget_pinned(disk, &slots);
        let transfer = Transfer { states, ..Transfer::new(Direction::Erase, Vec::new()) };
        self.start(transfer, InFlight::EraseStates { slots });
    }

    pub(super) fn finish_state_erase(&mut self, slots: &[u32]) {
        if let Some(StateTier { disk: Some(disk), .. }) = &mut self.states {
            slots.iter().for_each(|slot| disk.unpin(*slot));
        }
    }

    /// Starts to read the state in this slot of the disk to the host, if that has a slot.
    pub(super) fn read_state(&mut self, block: u32, root: PrefixRoot) -> Option<BlockCopy> {
        let states = self.states.as_mut()?;
        let SlotHeader { name, tokens, .. } = states.disk.as_ref()?.header(block)?;
        let slot = states.insert(TierBlock { name, parent: None, tokens: &tokens, root: Some(root) })?;
        let disk = states.disk.as_mut()?;
        disk.pin(block);
        disk.touch(block);
        Some(BlockCopy { block, slot })
    }

    /// Ends the pin of the state that a load has copied, if any. True if its checksum, the last one, is right;
    /// otherwise it is forgotten, also on the disk, where it may come from.
    pub(super) fn finish_loaded_state(&mut self, load: &Load<K>, done: &TransferDone) -> bool {
        let (Some((_, slot)), Some(states)) = (&load.state, &mut self.states) else { return false };
        let (expected, name) = (states.host.checksum(*slot), states.host.name(*slot));
        let is_same = done.result.as_ref().map(|checksums| checksums.last().copied() == expected);
        if is_same == Ok(false) {
            self.stats.corrupt_blocks += 1;
            log::warn!("the copy of a state has changed; its tokens are computed again");
            states.host.forget(*slot);
        }
        states.host.unpin(*slot);
        if is_same == Ok(false) {
            self.erase_states_of(name.as_slice());
        }
        is_same == Ok(true)
    }

    /// Number of states that are being written.
    fn writing_states(&self) -> usize {
        let states = |kind: &InFlight<K>| if let InFlight::WriteStates { copies } = kind { copies.len() } else { 0 };
        self.in_flight.values().map(states).sum()
    }
}

/// The block before the end of the first `end` of the `tokens` of a sequence; `None` if it has no name.
fn last_block<'a>(table: &BlockTable, tokens: &'a [u32], end: usize) -> Option<TierBlock<'a>> {
    let size = table.block_tokens();
    let at = (end / size).checked_sub(1)?;
    let name = *table.names().get(at)?;
    let parent = at.checked_sub(1).map(|before| table.names()[before]);
    Some(TierBlock { name, parent, tokens: tokens.get(at * size..(at + 1) * size)?, root: Some(table.root()) })
}
