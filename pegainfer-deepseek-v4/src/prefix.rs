//! The prefix cache: computed prefixes at multiples of 128 tokens.
//!
//! A prefix is a chain of pages and, at some of its ends, a copy of the slot as it was there: the window, and the overlap
//! of the sparse layers' compressors. Without that copy the pages cannot be gone on from, so a match ends at one.

use crate::plan::PAGE_TOKENS;
use pegainfer_core::kv::{BlockPool, BlockRef};
use std::collections::{BTreeMap, HashMap};

/// What comes before a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Parent {
    /// Nothing; prefixes are shared between requests of the same salt.
    Root(u64),
    /// The page of this node.
    Node(u64),
}

/// Keys are compared whole: no collision can serve one prompt the state of another.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    parent: Parent,
    tokens: [u32; PAGE_TOKENS],
}

#[derive(Debug)]
struct Node {
    key: Key,
    page: BlockRef,
    /// The slot that has a copy of the state behind this page.
    copy: Option<u32>,
    children: usize,
    /// When it was used last.
    used: u64,
}

/// A prefix that was found.
#[derive(Debug)]
pub(crate) struct Match {
    /// Its pages.
    pub pages: Vec<BlockRef>,
    /// The slot to copy from.
    pub copy: u32,
}

/// Pages and copies of computed prefixes, least recently used first out.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    nodes: BTreeMap<u64, Node>,
    index: HashMap<Key, u64>,
    /// Slots for copies that are unused.
    free: Vec<u32>,
    /// Never reused, so that a node can never be reached through another parent.
    next: u64,
    clock: u64,
}

impl PrefixCache {
    /// An empty cache that may keep copies in `slots`.
    pub fn new(slots: std::ops::Range<u32>) -> Self {
        Self { nodes: BTreeMap::new(), index: HashMap::new(), free: slots.collect(), next: 0, clock: 0 }
    }

    /// The longest cached prefix of `tokens` that leaves at least one to compute.
    pub fn find(&mut self, tokens: &[u32], salt: u64) -> Option<Match> {
        self.clock += 1;
        let usable = &tokens[..tokens.len().saturating_sub(1)];
        let (mut parent, mut pages, mut found) = (Parent::Root(salt), Vec::new(), None);
        for chunk in usable.as_chunks::<PAGE_TOKENS>().0 {
            let Some(&id) = self.index.get(&Key { parent, tokens: *chunk }) else { break };
            let Some(node) = self.nodes.get_mut(&id) else { break };
            node.used = self.clock;
            pages.push(node.page.clone());
            parent = Parent::Node(id);
            if let Some(copy) = node.copy {
                found = Some((pages.len(), copy));
            }
        }
        let (count, copy) = found?;
        pages.truncate(count);
        Some(Match { pages, copy })
    }

    /// A slot for a copy, taken from the prefix that was not used for longest if there is no other.
    pub fn take_slot(&mut self) -> Option<u32> {
        self.free.pop().or_else(|| {
            let oldest = self.nodes.values_mut().filter(|node| node.copy.is_some()).min_by_key(|node| node.used)?;
            oldest.copy.take()
        })
    }

    /// Gives back a slot that [`insert`](Self::insert) did not get.
    pub fn return_slot(&mut self, slot: u32) {
        self.free.push(slot);
    }

    /// Enters the pages of `tokens`, whole pages all, and the copy of the state behind them.
    pub fn insert(&mut self, tokens: &[u32], pages: &[BlockRef], salt: u64, copy: u32) {
        self.clock += 1;
        let mut parent = Parent::Root(salt);
        for (chunk, page) in tokens.as_chunks::<PAGE_TOKENS>().0.iter().zip(pages) {
            let key = Key { parent, tokens: *chunk };
            let id = match self.index.get(&key) {
                Some(&id) => id,
                None => self.add(key, page.clone()),
            };
            if let Some(node) = self.nodes.get_mut(&id) {
                node.used = self.clock;
            }
            parent = Parent::Node(id);
        }
        let last = if let Parent::Node(id) = parent { self.nodes.get_mut(&id) } else { None };
        match last.map(|node| node.copy.get_or_insert(copy)) {
            // Another sequence has computed the same prefix before.
            Some(kept) if *kept != copy => self.free.push(copy),
            Some(_) => {}
            None => self.free.push(copy),
        }
    }

    fn add(&mut self, key: Key, page: BlockRef) -> u64 {
        let id = self.next;
        self.next += 1;
        if let Parent::Node(parent) = key.parent
            && let Some(parent) = self.nodes.get_mut(&parent)
        {
            parent.children += 1;
        }
        self.index.insert(key.clone(), id);
        self.nodes.insert(id, Node { key, page, copy: None, children: 0, used: self.clock });
        id
    }

    /// Drops the end of the prefix that was not used for longest; false if there is nothing to drop. Its page is free
    /// unless a sequence holds it.
    pub fn evict(&mut self) -> bool {
        let leaves = self.nodes.iter().filter(|(_, node)| node.children == 0);
        let Some(id) = leaves.min_by_key(|(_, node)| node.used).map(|(id, _)| *id) else { return false };
        let Some(node) = self.nodes.remove(&id) else { return false };
        self.index.remove(&node.key);
        self.free.extend(node.copy);
        if let Parent::Node(parent) = node.key.parent
            && let Some(parent) = self.nodes.get_mut(&parent)
        {
            parent.children -= 1;
        }
        true
    }

    /// Pages that no sequence holds.
    pub fn idle_pages(&self) -> usize {
        // The handle of the cache is the only one.
        self.nodes.values().filter(|node| std::sync::Arc::strong_count(&node.page) == 1).count()
    }

    /// A page of the pool, evicting prefixes if need be.
    pub fn allocate(&mut self, pool: &BlockPool) -> Option<BlockRef> {
        loop {
            if let Some(page) = pool.allocate() {
                return Some(page);
            }
            // Prefixes whose pages all belong to running sequences would free nothing.
            if self.idle_pages() == 0 || !self.evict() {
                return None;
            }
        }
    }

    /// Forgets every prefix.
    pub fn clear(&mut self) {
        while self.evict() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(seed: u32, n: usize) -> Vec<u32> {
        (0..n as u32).map(|i| seed * 10_000 + i).collect()
    }

    fn pages(pool: &BlockPool, n: usize) -> Vec<BlockRef> {
        (0..n).map(|_| pool.allocate().unwrap()).collect()
    }

    #[test]
    fn a_match_ends_at_a_copy_and_leaves_a_token() {
        let (pool, mut cache) = (BlockPool::new(8, PAGE_TOKENS), PrefixCache::new(4..6));
        let prompt = tokens(1, 400);
        let held = pages(&pool, 3);
        let slot = cache.take_slot().unwrap();
        cache.insert(&prompt[..256], &held[..2], 0, slot);
        let found = cache.find(&prompt, 0).unwrap();
        assert_eq!((found.pages.len(), found.copy), (2, slot));
        assert!(cache.find(&prompt[..256], 0).is_none(), "no copy was kept after the first page");
        assert_eq!(cache.find(&prompt[..257], 0).unwrap().pages.len(), 2);
        assert!(cache.find(&prompt, 7).is_none(), "another salt");
        assert!(cache.find(&tokens(2, 400), 0).is_none());
        let first = cache.take_slot().unwrap();
        cache.insert(&prompt[..128], &held[..1], 0, first);
        assert_eq!(cache.find(&prompt[..256], 0).unwrap().copy, first);
    }

    #[test]
    fn the_least_recently_used_prefix_goes_first_and_nothing_leaks() {
        let (pool, mut cache) = (BlockPool::new(4, PAGE_TOKENS), PrefixCache::new(0..2));
        let (a, b) = (tokens(1, 300), tokens(2, 300));
        for prompt in [&a, &b] {
            let slot = cache.take_slot().unwrap();
            cache.insert(&prompt[..256], &pages(&pool, 2), 0, slot);
        }
        assert_eq!((cache.idle_pages(), pool.available()), (4, 0));
        cache.find(&a, 0).unwrap();
        let taken = cache.allocate(&pool).unwrap();
        assert!(cache.find(&b, 0).is_none(), "the end of the older prefix is gone, and its copy");
        assert_eq!(cache.find(&a, 0).unwrap().pages.len(), 2);
        drop(taken);
        // Both copies are in use again, so the next one takes the older prefix's.
        let slot = cache.take_slot().unwrap();
        cache.insert(&b[..128], &pages(&pool, 1), 0, slot);
        let stolen = cache.take_slot().unwrap();
        assert!(cache.find(&a, 0).is_none());
        cache.return_slot(stolen);
        cache.clear();
        assert_eq!((pool.available(), cache.free.len(), cache.nodes.len(), cache.index.len()), (4, 2, 0, 0));
        pool.check(0).unwrap();
    }

    #[test]
    fn the_same_prefix_twice_keeps_one_copy() {
        let (pool, mut cache) = (BlockPool::new(4, PAGE_TOKENS), PrefixCache::new(0..2));
        let prompt = tokens(1, 128);
        for _ in 0..2 {
            let slot = cache.take_slot().unwrap();
            cache.insert(&prompt, &pages(&pool, 1), 0, slot);
        }
        assert_eq!((cache.free.len(), pool.available()), (1, 3));
    }
}
