//! Which slots of a tier hold which blocks.

use crate::kv::disk::SlotHeader;
use crate::kv::{ContentName, PrefixRoot};
use std::collections::BTreeSet;

/// A full block as a tier knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierBlock<'a> {
    /// Its name.
    pub name: ContentName,
    /// Name of the block before; `None` at the start of a sequence.
    pub parent: Option<ContentName>,
    /// Its tokens.
    pub tokens: &'a [u32],
    /// Root of its sequence, if it is known; not compared, because the name depends on it.
    pub root: Option<PrefixRoot>,
}

/// No slot.
const NONE: u32 = u32::MAX;

/// What a slot holds.
#[derive(Debug, Clone, Copy)]
struct Entry {
    name: ContentName,
    parent: Option<ContentName>,
    root: Option<PrefixRoot>,
    /// The parent's entry, if it had one when this one was made.
    parent_entry: Option<Born>,
    /// Number of entries whose parent this is.
    children: u32,
    /// When the entry was made.
    born: u64,
    /// Number of transfers that read the slot, or 1 for the one that fills it.
    pins: u32,
    /// Present once the slot is filled.
    checksum: Option<u64>,
    /// True if nobody may find it any more; the slot is emptied when its last pin ends.
    forgotten: bool,
    /// Time of the last use.
    used: u64,
    /// True if it is evicted before those that are not.
    spare: bool,
    /// Next slot in the bucket, or [`NONE`].
    next: u32,
}

/// An entry: its slot, and when it was made, which tells it from later ones of that slot.
type Born = (u32, u64);

/// Place in the order of evictions: spare blocks first, then by the time of their last use.
type Order = (bool, u64, u32);

/// The slots of a tier, each empty or with one block. Blocks are found by name; their parents and tokens are compared,
/// too. Evicts the least recently used block that no other block follows, so that no block outlives the one before it, and
/// spare ones first.
#[derive(Debug)]
pub struct SlotIndex {
    /// First slot of each bucket, or [`NONE`]. A `HashMap` would stop to rehash now and then.
    buckets: Vec<u32>,
    entries: Vec<Option<Entry>>,
    /// Tokens of the entries, `[slots, block_tokens]`.
    tokens: Vec<u32>,
    block_tokens: usize,
    free: Vec<u32>,
    /// Filled slots without pins and children, in the order of their eviction.
    evictable: BTreeSet<Order>,
    now: u64,
}

impl SlotIndex {
    /// `slots` empty slots for blocks of `block_tokens` tokens.
    pub fn new(slots: usize, block_tokens: usize) -> Self {
        let buckets = (2 * slots).next_power_of_two();
        Self {
            buckets: vec![NONE; buckets],
            entries: vec![None; slots],
            tokens: vec![0; slots * block_tokens],
            block_tokens,
            free: (0..slots as u32).rev().collect(),
            evictable: BTreeSet::new(),
            now: 0,
        }
    }

    /// The slots of a disk after a restart, with the blocks that were found there.
    pub fn restored(slots: usize, block_tokens: usize, found: impl IntoIterator<Item = (u32, SlotHeader)>) -> Self {
        let mut index = Self::new(slots, block_tokens);
        for (slot, SlotHeader { name, parent, tokens, checksum }) in found {
            let fits = (slot as usize) < slots && tokens.len() == block_tokens;
            if !fits || index.entries[slot as usize].is_some() || index.knows(name) {
                continue;
            }
            index.place(slot, TierBlock { name, parent, tokens: &tokens, root: None }, None);
            index.fill(slot, checksum);
        }
        index.free.retain(|slot| index.entries[*slot as usize].is_none());
        for slot in 0..slots as u32 {
            let parent = index.entry(slot).and_then(|entry| index.entry_of(entry.parent?));
            let Some(parent) = parent.filter(|(parent, _)| *parent != slot) else { continue };
            index.update(slot, |entry| entry.parent_entry = Some(parent));
            index.update(parent.0, |entry| entry.children += 1);
        }
        index
    }

    /// Number of slots.
    pub fn total(&self) -> usize {
        self.entries.len()
    }

    /// Number of slots with a block.
    pub fn used(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// The filled slot of this block.
    pub fn find(&self, block: TierBlock<'_>) -> Option<u32> {
        let slot = self.search(block.name)?;
        let entry = self.entry(slot)?;
        let same = entry.parent == block.parent && self.tokens(slot) == block.tokens;
        (same && entry.checksum.is_some()).then_some(slot)
    }

    /// True if a slot holds this block, or is being filled with it.
    pub fn knows(&self, name: ContentName) -> bool {
        self.search(name).is_some()
    }

    /// Checksum of a filled slot.
    pub fn checksum(&self, slot: u32) -> Option<u64> {
        self.entry(slot)?.checksum
    }

    /// True if a slot is empty.
    pub fn has_empty(&self) -> bool {
        !self.free.is_empty()
    }

    /// The slot of this block, filled or not.
    pub fn slot_of(&self, name: ContentName) -> Option<u32> {
        self.search(name)
    }

    /// Name of the block of a slot, unless it is forgotten.
    pub fn name(&self, slot: u32) -> Option<ContentName> {
        self.entry(slot).filter(|entry| !entry.forgotten).map(|entry| entry.name)
    }

    /// Root of the sequence of a slot's block, if it is known.
    pub fn root(&self, slot: u32) -> Option<PrefixRoot> {
        self.entry(slot)?.root
    }

    /// The block of a filled slot.
    pub fn header(&self, slot: u32) -> Option<SlotHeader> {
        let Entry { name, parent, checksum, .. } = *self.entry(slot)?;
        Some(SlotHeader { name, parent, tokens: self.tokens(slot).to_vec(), checksum: checksum? })
    }

    /// Marks the block of a slot as just used.
    pub fn touch(&mut self, slot: u32) {
        self.now += 1;
        let now = self.now;
        self.update(slot, |entry| entry.used = now);
    }

    /// Whether the block of a slot is evicted before those that are not spare.
    pub fn set_spare(&mut self, slot: u32, spare: bool) {
        self.update(slot, |entry| entry.spare = spare);
    }

    /// Takes a slot for a block that no slot knows, evicting another block if none is free. The slot is pinned and
    /// found once it is [`filled`](Self::fill). `None` if all others are in use.
    pub fn insert(&mut self, block: TierBlock<'_>) -> Option<(u32, Option<ContentName>)> {
        debug_assert!(!self.knows(block.name), "the block has a slot");
        // Before the eviction, which must not take the parent.
        let parent = block.parent.and_then(|parent| self.entry_of(parent));
        self.update_parent(parent, |parent| parent.children += 1);
        let Some((slot, evicted)) = self.take_slot() else {
            self.update_parent(parent, |parent| parent.children -= 1);
            return None;
        };
        self.place(slot, block, parent);
        Some((slot, evicted))
    }

    /// Makes the entry of an empty slot, pinned.
    fn place(&mut self, slot: u32, block: TierBlock<'_>, parent_entry: Option<Born>) {
        self.now += 1;
        let bucket = self.bucket(block.name);
        let next = std::mem::replace(&mut self.buckets[bucket], slot);
        self.tokens[slot as usize * self.block_tokens..][..self.block_tokens].copy_from_slice(block.tokens);
        let TierBlock { name, parent, root, .. } = block;
        self.entries[slot as usize] = Some(Entry {
            name,
            parent,
            root,
            parent_entry,
            children: 0,
            born: self.now,
            pins: 1,
            checksum: None,
            forgotten: false,
            used: self.now,
            spare: false,
            next,
        });
    }

    fn take_slot(&mut self) -> Option<(u32, Option<ContentName>)> {
        if let Some(slot) = self.free.pop() {
            return Some((slot, None));
        }
        let (_, _, slot) = self.evictable.first().copied()?;
        let name = self.entry(slot)?.name;
        self.remove(slot);
        Some((self.free.pop()?, Some(name)))
    }

    /// The slot is filled, and no longer pinned by the transfer that filled it.
    pub fn fill(&mut self, slot: u32, checksum: u64) {
        self.update(slot, |entry| entry.checksum = Some(checksum));
        self.unpin(slot);
    }

    /// Keeps the slot until it is [`unpinned`](Self::unpin).
    pub fn pin(&mut self, slot: u32) {
        self.update(slot, |entry| entry.pins += 1);
    }

    /// Ends one pin.
    pub fn unpin(&mut self, slot: u32) {
        self.update(slot, |entry| entry.pins -= 1);
        if self.entry(slot).is_some_and(|entry| entry.forgotten) {
            self.remove(slot);
        }
    }

    /// Empties a slot. Blocks that follow stay: they are found where the block before them is on the device. Returns
    /// the name; `None` if the slot is empty or still pinned.
    pub fn remove(&mut self, slot: u32) -> Option<ContentName> {
        let entry = self.entry(slot).copied().filter(|entry| entry.pins == 0)?;
        let Entry { name, parent_entry, next, .. } = entry;
        self.evictable.remove(&entry.order(slot));
        let bucket = self.bucket(name);
        if self.buckets[bucket] == slot {
            self.buckets[bucket] = next;
        } else {
            let mut before = self.buckets[bucket];
            while let Some(entry) = self.entries[before as usize].as_mut() {
                if entry.next == slot {
                    entry.next = next;
                    break;
                }
                before = entry.next;
            }
        }
        self.entries[slot as usize] = None;
        self.free.push(slot);
        self.update_parent(parent_entry, |parent| parent.children -= 1);
        Some(name)
    }

    /// Empties a slot that could not be filled.
    pub fn abandon(&mut self, slot: u32) {
        self.update(slot, |entry| entry.forgotten = true);
        self.unpin(slot);
    }

    /// Nobody finds this block any more; the slot is emptied now or when its last pin ends.
    pub fn forget(&mut self, slot: u32) {
        self.update(slot, |entry| entry.forgotten = true);
        self.remove(slot);
    }

    /// Slots with blocks that are not forgotten.
    pub fn known(&self) -> Vec<u32> {
        let is_known = |(_, entry): &(u32, &Option<Entry>)| entry.is_some_and(|entry| !entry.forgotten);
        (0..).zip(&self.entries).filter(is_known).map(|(slot, _)| slot).collect()
    }

    /// Forgets all blocks.
    pub fn clear(&mut self) {
        (0..self.entries.len() as u32).for_each(|slot| self.forget(slot));
    }

    /// Checks the bookkeeping, for tests; `pinned` is the number of pins that the caller has.
    pub fn check(&self, pinned: usize) -> Result<(), String> {
        let entries =
            || self.entries.iter().enumerate().filter_map(|(slot, entry)| Some((slot as u32, entry.as_ref()?)));
        let pins: usize = entries().map(|(_, entry)| entry.pins as usize).sum();
        if pins != pinned {
            return Err(format!("{pins} pins instead of {pinned}"));
        }
        for (slot, entry) in entries() {
            if !entry.forgotten && self.search(entry.name) != Some(slot) {
                return Err(format!("slot {slot} is not found by its name"));
            }
            let children = entries().filter(|(_, other)| other.parent_entry == Some((slot, entry.born))).count();
            if children != entry.children as usize {
                return Err(format!("slot {slot} has {children} children instead of {}", entry.children));
            }
            if self.evictable.contains(&entry.order(slot)) != is_evictable(entry) {
                return Err(format!("slot {slot} is not evictable when it should be, or is when it should not"));
            }
        }
        match entries().count() + self.free.len() == self.total() && self.evictable.len() <= entries().count() {
            true => Ok(()),
            false => Err("a slot is lost".into()),
        }
    }

    fn entry(&self, slot: u32) -> Option<&Entry> {
        self.entries.get(slot as usize)?.as_ref()
    }

    fn tokens(&self, slot: u32) -> &[u32] {
        &self.tokens[slot as usize * self.block_tokens..][..self.block_tokens]
    }

    /// Changes an entry, and whether it may be evicted; nothing without one.
    fn update(&mut self, slot: u32, change: impl FnOnce(&mut Entry)) {
        let Some(entry) = self.entries.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        if is_evictable(entry) {
            self.evictable.remove(&entry.order(slot));
        }
        change(entry);
        if is_evictable(entry) {
            self.evictable.insert(entry.order(slot));
        }
    }

    /// Changes the entry of a parent, if it is still there.
    fn update_parent(&mut self, parent: Option<Born>, change: impl FnOnce(&mut Entry)) {
        if let Some((slot, born)) = parent
            && self.entry(slot).is_some_and(|entry| entry.born == born)
        {
            self.update(slot, change);
        }
    }

    /// The entry of a block.
    fn entry_of(&self, name: ContentName) -> Option<Born> {
        let slot = self.search(name)?;
        Some((slot, self.entry(slot)?.born))
    }

    /// Names are hashes with a secret key, so some bits of them choose the bucket.
    fn bucket(&self, name: ContentName) -> usize {
        name.low() as usize & (self.buckets.len() - 1)
    }

    fn search(&self, name: ContentName) -> Option<u32> {
        let mut slot = self.buckets[self.bucket(name)];
        while let Some(entry) = self.entry(slot) {
            if entry.name == name && !entry.forgotten {
                return Some(slot);
            }
            slot = entry.next;
        }
        None
    }
}

impl Entry {
    fn order(&self, slot: u32) -> Order {
        (!self.spare, self.used, slot)
    }
}

fn is_evictable(entry: &Entry) -> bool {
    entry.pins == 0 && entry.children == 0
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;
