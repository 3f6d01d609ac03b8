//! The order in which idle blocks are evicted.

/// No block.
const NONE: u32 = u32::MAX;

/// Blocks in the order in which they were added: a doubly linked list in arrays, so that every operation takes constant time and
/// none allocates.
#[derive(Debug)]
pub(super) struct IdleList {
    /// By block; the last one is the end of the list: after it comes the oldest block, before it the newest.
    links: Vec<Link>,
    len: usize,
}

/// The neighbours of a block in the list; [`NONE`] while it is not in the list.
#[derive(Debug, Clone, Copy)]
struct Link {
    older: u32,
    newer: u32,
}

impl IdleList {
    /// An empty list for a pool of `blocks` blocks.
    pub fn new(blocks: usize) -> Self {
        let mut links = vec![Link { older: NONE, newer: NONE }; blocks + 1];
        let end = blocks as u32;
        links[blocks] = Link { older: end, newer: end };
        Self { links, len: 0 }
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether `block` is in the list.
    pub fn has(&self, block: u32) -> bool {
        self.links[block as usize].newer != NONE
    }

    /// Adds `block`, which is not in the list, as the newest.
    pub fn push(&mut self, block: u32) {
        debug_assert!(!self.has(block), "an idle block became idle");
        let end = self.end();
        let newest = self.links[end as usize].older;
        self.links[block as usize] = Link { older: newest, newer: end };
        self.links[newest as usize].newer = block;
        self.links[end as usize].older = block;
        self.len += 1;
    }

    /// Takes `block` out, if it is in the list.
    pub fn remove(&mut self, block: u32) {
        if self.has(block) {
            let Link { older, newer } = self.links[block as usize];
            self.links[older as usize].newer = newer;
            self.links[newer as usize].older = older;
            self.links[block as usize] = Link { older: NONE, newer: NONE };
            self.len -= 1;
        }
    }

    /// Takes the oldest block out.
    pub fn pop_oldest(&mut self) -> Option<u32> {
        let oldest = self.iter().next()?;
        self.remove(oldest);
        Some(oldest)
    }

    /// The blocks, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        let in_list = |block: u32| (block != self.end()).then_some(block);
        let first = in_list(self.links[self.end() as usize].newer);
        std::iter::successors(first, move |block| in_list(self.links[*block as usize].newer))
    }

    fn end(&self) -> u32 {
        (self.links.len() - 1) as u32
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
