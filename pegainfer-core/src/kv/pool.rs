//! The block pool.

use super::index::{Index, Key, Node};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

#[derive(Debug)]
struct Slot {
    /// Position in the eviction order while the block is indexed and nobody holds it.
    idle_since: Option<u64>,
    /// Empty while nobody holds the block: a weak reference would keep its allocation.
    held: Weak<Block>,
}

#[derive(Debug)]
struct Inner {
    slots: Vec<Slot>,
    free: Vec<u32>,
    index: Index,
    /// Indexed blocks that nobody holds, least recently used first.
    idle: BTreeMap<u64, u32>,
    clock: u64,
}

/// A fixed number of KV blocks, shared by every request of an engine. Clones are handles to the same pool.
#[derive(Debug, Clone)]
pub struct BlockPool {
    inner: Arc<Mutex<Inner>>,
    total: usize,
    block_tokens: usize,
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
        slot.held = Weak::new();
        if inner.index.has(self.id) {
            debug_assert!(slot.idle_since.is_none(), "a held block was idle");
            slot.idle_since = Some(inner.clock);
            inner.idle.insert(inner.clock, self.id);
        } else {
            inner.free.push(self.id);
        }
    }
}

fn lock(inner: &Mutex<Inner>) -> MutexGuard<'_, Inner> {
    // No user code runs under the lock, so a poisoned pool is still consistent.
    inner.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BlockPool {
    /// A pool of `total` free blocks of `block_tokens` tokens, at least 1.
    pub fn new(total: usize, block_tokens: usize) -> Self {
        assert!(block_tokens > 0, "a block has tokens");
        let inner = Inner {
            slots: (0..total).map(|_| Slot { idle_since: None, held: Weak::new() }).collect(),
            // Popped from the end: hand out low ids first.
            free: (0..total as u32).rev().collect(),
            index: Index::new(total, block_tokens),
            idle: BTreeMap::new(),
            clock: 0,
        };
        Self { inner: Arc::new(Mutex::new(inner)), total, block_tokens }
    }

    /// Blocks of the pool.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
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
                inner.slots[id as usize].idle_since = None;
                inner.index.remove(id);
                id
            }
        };
        Some(self.hold(inner, id))
    }

    /// The indexed block with this key, held, and its node.
    pub(super) fn lookup(&self, key: Key<'_>) -> Option<(BlockRef, Node)> {
        let mut guard = lock(&self.inner);
        let inner = &mut *guard;
        let (id, node) = inner.index.find(key)?;
        let slot = &mut inner.slots[id as usize];
        match slot.idle_since.take() {
            Some(since) => {
                inner.idle.remove(&since);
                Some((self.hold(inner, id), node))
            }
            None => slot.held.upgrade().map(|block| (block, node)),
        }
    }

    /// Enters a full, computed block in the index and returns its node. When another block already holds the same
    /// tokens, that one stays the indexed one.
    pub(super) fn register(&self, block: &BlockRef, key: Key<'_>) -> Node {
        lock(&self.inner).index.enter(block.id, key)
    }

    /// Empties the prefix index: no prefix entered before is found again. Blocks that are held stay with their holders
    /// and are free, not cached, afterwards.
    pub fn forget_prefixes(&self) {
        let mut guard = lock(&self.inner);
        let inner = &mut *guard;
        inner.index.clear();
        inner.free.extend(std::mem::take(&mut inner.idle).into_values());
        for slot in &mut inner.slots {
            slot.idle_since = None;
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
        let marked = inner.slots.iter().filter(|s| s.idle_since.is_some()).count();
        if marked != inner.idle.len() || !inner.idle.values().all(|&id| inner.index.has(id)) {
            return fail("the index and the blocks disagree");
        }
        if !inner.index.is_consistent() {
            return fail("the index lost a block");
        }
        Ok(())
    }
}
