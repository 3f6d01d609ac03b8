//! The block pool and its prefix index.

use super::BLOCK_SIZE;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Identity of an indexed block: never reused, so a child entry can never be reached through another parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Node {
    /// Start of every sequence with this salt.
    Root(u64),
    /// The block registered with this serial number.
    Block(u64),
}

/// What a block holds: its tokens, and what comes before them. Keys are compared whole, so that unlike with a hash
/// chain no collision can serve one prompt the KV of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub parent: Node,
    pub tokens: [u32; BLOCK_SIZE],
}

#[derive(Debug)]
struct Entry {
    key: Key,
    node: u64,
    /// Position in the eviction order while nobody holds the block.
    idle_since: Option<u64>,
}

#[derive(Debug)]
struct Slot {
    entry: Option<Entry>,
    held: Weak<Block>,
}

#[derive(Debug)]
struct Inner {
    slots: Vec<Slot>,
    free: Vec<u32>,
    index: HashMap<Key, u32>,
    /// Indexed blocks that nobody holds, least recently used first.
    idle: BTreeMap<u64, u32>,
    clock: u64,
    next_node: u64,
}

/// A fixed number of KV blocks, shared by every request of an engine. Clones are handles to the same pool.
#[derive(Debug, Clone)]
pub struct BlockPool {
    inner: Arc<Mutex<Inner>>,
    total: usize,
}

/// A held block. It goes back to the pool when the last reference is dropped.
#[derive(Debug)]
pub struct Block {
    id: u32,
    pool: Arc<Mutex<Inner>>,
}

/// A shared, counted hold on a block.
pub type BlockRef = Arc<Block>;

impl Block {
    /// Index of the block in the device's KV buffer.
    pub fn id(&self) -> u32 {
        self.id
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let inner = &mut *lock(&self.pool);
        inner.clock += 1;
        let slot = &mut inner.slots[self.id as usize];
        match &mut slot.entry {
            Some(entry) => {
                debug_assert!(entry.idle_since.is_none(), "a held block was idle");
                entry.idle_since = Some(inner.clock);
                inner.idle.insert(inner.clock, self.id);
            }
            None => inner.free.push(self.id),
        }
    }
}

fn lock(inner: &Mutex<Inner>) -> MutexGuard<'_, Inner> {
    // No user code runs under the lock, so a poisoned pool is still consistent.
    inner.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BlockPool {
    /// A pool of `total` free blocks.
    pub fn new(total: usize) -> Self {
        let inner = Inner {
            slots: (0..total).map(|_| Slot { entry: None, held: Weak::new() }).collect(),
            // Popped from the end: hand out low ids first.
            free: (0..total as u32).rev().collect(),
            index: HashMap::new(),
            idle: BTreeMap::new(),
            clock: 0,
            next_node: 0,
        };
        Self { inner: Arc::new(Mutex::new(inner)), total }
    }

    /// Blocks of the pool.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Blocks that can be allocated now, cached prefixes that nobody holds included.
    pub fn available(&self) -> usize {
        let inner = lock(&self.inner);
        inner.free.len() + inner.idle.len()
    }

    /// A block with undefined contents, evicting the least recently used cached prefix if need be.
    pub fn allocate(&self) -> Option<BlockRef> {
        let mut guard = lock(&self.inner);
        let inner = &mut *guard;
        let id = match inner.free.pop() {
            Some(id) => id,
            None => {
                let (_, id) = inner.idle.pop_first()?;
                let entry = inner.slots[id as usize].entry.take();
                if let Some(entry) = entry {
                    inner.index.remove(&entry.key);
                }
                id
            }
        };
        Some(self.hold(inner, id))
    }

    /// The indexed block with this key, held, and its node.
    pub(super) fn lookup(&self, key: &Key) -> Option<(BlockRef, Node)> {
        let mut guard = lock(&self.inner);
        let inner = &mut *guard;
        let id = *inner.index.get(key)?;
        let slot = &mut inner.slots[id as usize];
        let entry = slot.entry.as_mut()?;
        let node = Node::Block(entry.node);
        match entry.idle_since.take() {
            Some(since) => {
                inner.idle.remove(&since);
                Some((self.hold(inner, id), node))
            }
            None => slot.held.upgrade().map(|block| (block, node)),
        }
    }

    /// Enters a full, computed block in the index and returns its node. When another block already holds the same
    /// tokens, that one stays the indexed one.
    pub(super) fn register(&self, block: &BlockRef, key: Key) -> Node {
        let mut guard = lock(&self.inner);
        let inner = &mut *guard;
        if let Some(&id) = inner.index.get(&key)
            && let Some(entry) = &inner.slots[id as usize].entry
        {
            return Node::Block(entry.node);
        }
        let node = inner.next_node;
        inner.next_node += 1;
        inner.index.insert(key, block.id);
        let slot = &mut inner.slots[block.id as usize];
        debug_assert!(slot.entry.is_none(), "a block was registered twice");
        slot.entry = Some(Entry { key, node, idle_since: None });
        Node::Block(node)
    }

    /// Empties the prefix index: no prefix entered before is found again. Blocks that are held stay with their holders
    /// and are free, not cached, afterwards.
    pub fn forget_prefixes(&self) {
        let mut guard = lock(&self.inner);
        let inner = &mut *guard;
        inner.index.clear();
        inner.free.extend(std::mem::take(&mut inner.idle).into_values());
        for slot in &mut inner.slots {
            slot.entry = None;
        }
    }

    fn hold(&self, inner: &mut Inner, id: u32) -> BlockRef {
        let block = Arc::new(Block { id, pool: self.inner.clone() });
        inner.slots[id as usize].held = Arc::downgrade(&block);
        block
    }

    /// Checks every invariant of the bookkeeping; for tests. `held` is the number of distinct blocks the caller holds.
    pub fn check(&self, held: usize) -> Result<(), String> {
        let inner = lock(&self.inner);
        let live = inner.slots.iter().filter(|s| s.held.strong_count() > 0).count();
        let fail =
            |what: &str| Err(format!("{what}: {} free, {} idle, {live} held", inner.free.len(), inner.idle.len()));
        if live != held {
            return fail(&format!("the caller holds {held} blocks"));
        }
        if inner.free.len() + inner.idle.len() + live != self.total {
            return fail("a block leaked or is in two places");
        }
        let mut seen = vec![false; self.total];
        for &id in inner.free.iter().chain(inner.idle.values()) {
            if std::mem::replace(&mut seen[id as usize], true) || inner.slots[id as usize].held.strong_count() > 0 {
                return fail(&format!("block {id} was freed twice"));
            }
        }
        let registered = inner.slots.iter().filter(|s| s.entry.is_some()).count();
        if registered != inner.index.len() {
            return fail("the index and the blocks disagree");
        }
        Ok(())
    }
}
