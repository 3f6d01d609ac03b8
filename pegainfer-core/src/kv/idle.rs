//! Eviction order of idle blocks.

use super::index::prefetch;
use std::collections::VecDeque;

/// No ticket: the block is not in the list.
const NONE: u32 = 0;

/// Idle blocks in the order in which they were added: a queue whose entries become stale when their block is removed.
/// Unlike nodes of a linked list, entries lie in memory in eviction order, so no eviction waits for the address of the
/// next one.
#[derive(Debug)]
pub(super) struct IdleList {
    /// Blocks and their tickets, oldest first. An entry is stale if its block has another ticket.
    queue: VecDeque<(u32, u32)>,
    /// Ticket of each block's entry, or [`NONE`].
    tickets: Vec<u32>,
    /// The newest ticket. When tickets wrap around, no entry with the same ticket is left, because there are far fewer
    /// entries.
    ticket: u32,
    len: usize,
}

impl IdleList {
    /// An empty list for a pool of `blocks` blocks.
    pub fn new(blocks: usize) -> Self {
        Self { queue: VecDeque::with_capacity(2 * blocks), tickets: vec![NONE; blocks], ticket: NONE, len: 0 }
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if `block` is in the list.
    pub fn has(&self, block: u32) -> bool {
        self.tickets[block as usize] != NONE
    }

    /// Adds `block`, which is not in the list, as the newest.
    pub fn push(&mut self, block: u32) {
        debug_assert!(!self.has(block), "an idle block became idle");
        if self.queue.len() >= 2 * self.tickets.len() {
            // At least half of the entries are stale.
            let tickets = &self.tickets;
            self.queue.retain(|(block, ticket)| tickets[*block as usize] == *ticket);
        }
        self.ticket = self.ticket.checked_add(1).unwrap_or(NONE + 1);
        self.tickets[block as usize] = self.ticket;
        self.queue.push_back((block, self.ticket));
        self.len += 1;
    }

    /// Removes `block` if it is in the list.
    pub fn remove(&mut self, block: u32) {
        if self.has(block) {
            self.tickets[block as usize] = NONE;
            self.len -= 1;
        }
    }

    /// Removes the oldest block.
    pub fn pop_oldest(&mut self) -> Option<u32> {
        while let Some((block, ticket)) = self.queue.pop_front() {
            if self.tickets[block as usize] == ticket {
                self.remove(block);
                return Some(block);
            }
        }
        None
    }

    /// The block that will be removed after `entries` others, as far as that is known without reading them.
    pub fn ahead(&self, entries: usize) -> Option<u32> {
        self.queue.get(entries).map(|(block, _)| *block)
    }

    /// Prefetches the data for removing `block`.
    pub fn expect(&self, block: u32) {
        prefetch(&self.tickets[block as usize]);
    }

    /// The blocks, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        let is_current = |(block, ticket): &&(u32, u32)| self.tickets[*block as usize] == *ticket;
        self.queue.iter().filter(is_current).map(|(block, _)| *block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng;
    use std::collections::VecDeque;

    #[test]
    fn it_has_the_order_of_a_queue() {
        const BLOCKS: u32 = 16;
        let (mut list, mut expected) = (IdleList::new(BLOCKS as usize), VecDeque::new());
        for i in 0..10_000 {
            let block = rng::below(rng::bits(1, i), u64::from(BLOCKS)) as u32;
            assert_eq!(list.has(block), expected.contains(&block));
            if list.has(block) || rng::bits(2, i).is_multiple_of(3) {
                list.remove(block);
                expected.retain(|other| *other != block);
            } else {
                list.push(block);
                expected.push_back(block);
            }
            if rng::bits(3, i).is_multiple_of(8) {
                assert_eq!(list.pop_oldest(), expected.pop_front());
            }
            assert!(list.iter().eq(expected.iter().copied()) && list.len() == expected.len(), "after {i} changes");
        }
        while let Some(block) = list.pop_oldest() {
            assert_eq!(Some(block), expected.pop_front());
        }
        assert!(expected.is_empty() && list.len() == 0);
    }
}
