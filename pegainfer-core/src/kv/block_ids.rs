//! Lists of block ids that a sequence shares with its steps.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The blocks of one sequence at the time of a step, in token order: a prefix of a list that only grows.
///
/// A clone only increments a reference count, so every step has its own. Entries of a list never change; a sequence
/// that releases blocks starts another list. Two prefixes of one list therefore agree up to the length of the shorter
/// one, which [`shares_list`](Self::shares_list) finds without comparing entries.
/// length of the shorter one, and [`shares_list`](Self::shares_list) finds that without a look at the entries.
#[derive(Clone, Default)]
pub struct BlockIds {
    /// Entries from `len` on are unwritten, or belong to longer prefixes.
    list: Arc<[AtomicU32]>,
    len: usize,
}

impl BlockIds {
    /// Number of blocks.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are no blocks.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Block `i`, which holds tokens `i * n` to `(i + 1) * n - 1` for blocks of `n` tokens.
    ///
    /// # Panics
    /// If there are no more than `i` blocks.
    #[inline]
    pub fn at(&self, i: usize) -> u32 {
        read(&self.entries()[i])
    }

    /// The last block.
    #[inline]
    pub fn last(&self) -> Option<u32> {
        self.entries().last().map(read)
    }

    /// All blocks, in token order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = u32> + ExactSizeIterator {
        self.range(0..self.len)
    }

    /// The blocks of `range`, which must not end after the last one.
    pub fn range(&self, range: Range<usize>) -> impl DoubleEndedIterator<Item = u32> + ExactSizeIterator {
        self.entries()[range].iter().map(read)
    }

    /// True if both are prefixes of one list, so that the longer starts with the shorter. If false, they may still be
    /// equal.
    #[inline]
    pub fn shares_list(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.list, &other.list)
    }

    #[inline]
    fn entries(&self) -> &[AtomicU32] {
        &self.list[..self.len]
    }

    /// The first `len` entries, or all if there are fewer, in a new list with memory for `capacity` entries.
    fn in_new_list(&self, len: usize, capacity: usize) -> Self {
        let len = len.min(self.len);
        let unwritten = std::iter::repeat_n(0, capacity.saturating_sub(len));
        Self { list: self.range(0..len).chain(unwritten).map(AtomicU32::new).collect(), len }
    }
}

/// An entry of a prefix. It was written before the prefix was created, and the channel or lock that passed the prefix
/// to this thread orders the two accesses.
#[inline]
fn read(entry: &AtomicU32) -> u32 {
    entry.load(Ordering::Relaxed)
}

impl FromIterator<u32> for BlockIds {
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> Self {
        let list: Arc<[AtomicU32]> = ids.into_iter().map(AtomicU32::new).collect();
        Self { len: list.len(), list }
    }
}

impl PartialEq for BlockIds {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl fmt::Debug for BlockIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// The list of a sequence, and its only writer.
#[derive(Debug, Default)]
pub(super) struct BlockList(BlockIds);

impl BlockList {
    /// All blocks so far.
    #[inline]
    pub fn ids(&self) -> &BlockIds {
        &self.0
    }

    /// Reserves memory for `capacity` blocks in all, up to which the list stays the same.
    pub fn reserve(&mut self, capacity: usize) {
        if capacity > self.0.list.len() {
            self.0 = self.0.in_new_list(self.0.len, capacity);
        }
    }

    /// Adds a block. Without memory for it, a list of twice the capacity replaces this one.
    pub fn push(&mut self, id: u32) {
        let len = self.0.len;
        if len == self.0.list.len() {
            self.reserve((2 * len).max(4));
        }
        // No prefix contains this entry yet: each is as long as the list was when it was created.
        self.0.list[len].store(id, Ordering::Relaxed);
        self.0.len += 1;
    }

    /// Keeps the first `len` blocks in a new list, because steps may hold the old one.
    pub fn truncate(&mut self, len: usize) {
        if len < self.0.len {
            self.0 = self.0.in_new_list(len, self.0.list.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng;

    #[test]
    fn prefixes_keep_their_entries_whatever_becomes_of_the_list() {
        let mut list = BlockList::default();
        let (mut expected, mut prefixes) = (Vec::new(), Vec::<(BlockIds, Vec<u32>)>::new());
        let mut shared = 0;
        for i in 0..20_000 {
            let draw = rng::bits(11, i);
            match draw % 64 {
                0 => expected.truncate(draw as usize / 64 % 40),
                1 => list.reserve(draw as usize / 64 % 300),
                _ => expected.extend([i as u32; 3].iter().take(draw as usize / 64 % 4)),
            }
            list.truncate(expected.len());
            (list.ids().len()..expected.len()).for_each(|i| list.push(expected[i]));
            assert!(list.ids().iter().eq(expected.iter().copied()));
            assert_eq!(list.ids().last(), expected.last().copied());
            prefixes.push((list.ids().clone(), expected.clone()));
            if prefixes.len() > 50 {
                prefixes.remove(draw as usize / 1024 % 50);
            }
            for (prefix, entries) in &prefixes {
                assert!(prefix.iter().eq(entries.iter().copied()), "{prefix:?}");
                if prefix.shares_list(list.ids()) {
                    shared += 1;
                    assert!(expected.starts_with(entries), "one list, and other entries");
                }
            }
        }
        assert!(shared > 100_000, "{shared} prefixes of the same list");
    }

    #[test]
    fn a_list_with_memory_for_its_blocks_stays_the_same_until_it_is_cut() {
        let mut list = BlockList::default();
        list.reserve(100);
        list.push(7);
        let first = list.ids().clone();
        (0..99).for_each(|id| list.push(id));
        list.truncate(100);
        assert!(first.shares_list(list.ids()) && !first.shares_list(&first.iter().collect()));
        list.truncate(1);
        assert!(!first.shares_list(list.ids()) && first == *list.ids());
    }
}
