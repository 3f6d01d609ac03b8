//! The block pool.

use super::block_ids::BlockList;
use super::idle::IdleList;
use super::index::{Index, Key, Node};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Evictions from a stage of the preparation of one to the next.
const LOOKAHEAD: usize = 16;

/// The bookkeeping of a pool. A block is held, or free, or idle: in the index, so that a later request may find it.
#[derive(Debug)]
pub(super) struct Blocks {
    /// By block: tables that hold it.
    holders: Vec<u32>,
    free: Vec<u32>,
    index: Index,
    /// Indexed blocks that nobody holds, least recently used first.
    idle: IdleList,
}

/// A fixed number of KV blocks, shared by every request of an engine. Clones are handles to the same pool.
#[derive(Debug, Clone)]
pub struct BlockPool {
    blocks: Arc<Mutex<Blocks>>,
    /// Times that the prefix index was emptied.
    resets: Arc<AtomicU64>,
    total: usize,
    block_tokens: usize,
}

impl Blocks {
    /// Adds `count` blocks with undefined contents, held by the caller; evicts the least recently used cached prefixes if need be.
    /// False if there are not so many: then it has added all that there are.
    pub fn allocate(&mut self, count: usize, blocks: &mut BlockList) -> bool {
        for _ in 0..count {
            let Some(id) = self.free.pop().or_else(|| self.idle.pop_oldest()) else { return false };
            self.look_ahead();
            self.index.remove(id);
            self.index.expect_entry(id);
            self.holders[id as usize] = 1;
            blocks.push(id);
        }
        true
    }

    /// Prepares later evictions: tells memory what they will need, in two stages, of which the second reads what the first one fetched.
    fn look_ahead(&self) {
        if let Some(later) = self.idle.ahead(2 * LOOKAHEAD) {
            self.idle.expect(later);
            self.index.expect_lookup(later);
        }
        if let Some(later) = self.idle.ahead(LOOKAHEAD) {
            self.index.expect_removal(later);
        }
    }

    /// The indexed block with this key, held by the caller, too, and its node.
    pub fn lookup(&mut self, key: Key<'_>) -> Option<(u32, Node)> {
        let (id, node) = self.index.find(key)?;
        self.idle.remove(id);
        self.holders[id as usize] += 1;
        Some((id, node))
    }

    /// Enters full, computed blocks of one sequence in the index, the first one behind `parent`, and adds their nodes. Where another
    /// block holds the same tokens, that one stays the indexed one.
    pub fn register(&mut self, parent: Node, ids: &[u32], tokens: &[u32], nodes: &mut Vec<Node>) {
        self.index.enter(parent, ids, tokens, nodes);
    }

    /// The caller holds block `id` no longer.
    pub fn release(&mut self, id: u32) {
        let holders = &mut self.holders[id as usize];
        *holders -= 1;
        if *holders > 0 {
            return;
        }
        if self.index.has(id) {
            self.idle.push(id);
        } else {
            self.free.push(id);
        }
    }
}

impl BlockPool {
    /// A pool of `total` free blocks of `block_tokens` tokens, at least 1.
    pub fn new(total: usize, block_tokens: usize) -> Self {
        assert!(block_tokens > 0, "a block has tokens");
        let blocks = Blocks {
            holders: vec![0; total],
            // Popped from the end: hand out low ids first.
            free: (0..total as u32).rev().collect(),
            index: Index::new(total, block_tokens),
            idle: IdleList::new(total),
        };
        Self { blocks: Arc::new(Mutex::new(blocks)), resets: Arc::default(), total, block_tokens }
    }

    /// Blocks of the pool.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Tokens of a block.
    #[inline]
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Blocks that can be allocated now, cached prefixes that nobody holds included.
    pub fn available(&self) -> usize {
        let blocks = self.lock();
        blocks.free.len() + blocks.idle.len()
    }

    /// The bookkeeping, for several operations at once.
    pub(super) fn lock(&self) -> MutexGuard<'_, Blocks> {
        // No user code runs under the lock, so a poisoned pool is still consistent.
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Empties the prefix index: no prefix entered before is found again. Blocks that are held stay with their holders
    /// and are free, not cached, afterwards.
    pub fn forget_prefixes(&self) {
        let blocks = &mut *self.lock();
        self.resets.fetch_add(1, Ordering::Relaxed);
        blocks.index.clear();
        while let Some(id) = blocks.idle.pop_oldest() {
            blocks.free.push(id);
        }
    }

    /// Times that the prefix index was emptied. The number is only compared by the thread that empties it.
    pub(super) fn resets(&self) -> u64 {
        self.resets.load(Ordering::Relaxed)
    }

    /// Checks every invariant of the bookkeeping; for tests. `held` is the number of distinct blocks the caller holds.
    pub fn check(&self, held: usize) -> Result<(), String> {
        let blocks = self.lock();
        let live = blocks.holders.iter().filter(|holders| **holders > 0).count();
        let fail =
            |what: &str| Err(format!("{what}: {} free, {} idle, {live} held", blocks.free.len(), blocks.idle.len()));
        if live != held {
            return fail(&format!("the caller holds {held} blocks"));
        }
        if blocks.free.len() + blocks.idle.len() + live != self.total {
            return fail("a block leaked or is in two places");
        }
        let mut seen = vec![false; self.total];
        for id in blocks.free.iter().copied().chain(blocks.idle.iter()) {
            if std::mem::replace(&mut seen[id as usize], true) || blocks.holders[id as usize] > 0 {
                return fail(&format!("block {id} was freed twice"));
            }
        }
        if !blocks.idle.iter().all(|id| blocks.index.has(id)) {
            return fail("the index and the blocks disagree");
        }
        if !blocks.index.is_consistent() {
            return fail("the index lost a block");
        }
        Ok(())
    }
}
