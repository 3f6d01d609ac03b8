//! The block pool.

use super::block_ids::BlockList;
use super::block_images::BlockImages;
use super::changes::{ChangeLog, Changes, KvChange, Medium, StoredRun};
use super::idle::IdleList;
use super::image_numbers::ImageNumbers;
use super::index::{Index, Key, Node};
use super::named::{FullBlocks, Named, Parent};
use super::names::{ContentName, Naming};
use super::prefix_root::PrefixRoot;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of blocks that [`BlockPool::cached_prefix`] looks up before it lets the engine have the lock.
const PROBED_AT_ONCE: usize = 64;
/// Number of evictions between the two stages of preparing one.
const LOOKAHEAD: usize = 16;

/// Bookkeeping of a pool. A block is held, free, or idle, that is, in the index without a holder.
#[derive(Debug)]
pub(super) struct Blocks {
    /// Number of tables that hold each block.
    holders: Vec<u32>,
    free: Vec<u32>,
    index: Index,
    /// Indexed blocks without holders, least recently used first.
    idle: IdleList,
    /// Names of the indexed blocks, if something outside the device needs them.
    named: Option<Named>,
}

/// A fixed number of KV blocks, shared by every request of an engine. Clones are handles to the same pool.
#[derive(Debug, Clone)]
pub struct BlockPool {
    blocks: Arc<Mutex<Blocks>>,
    /// Numbers of images in keys.
    images: Arc<Mutex<ImageNumbers>>,
    /// Number of times that the prefix index was cleared.
    resets: Arc<AtomicU64>,
    total: usize,
    block_tokens: usize,
}

/// Blocks that stay as they are while this value lives.
#[derive(Debug)]
pub(super) struct HeldBlocks {
    pool: BlockPool,
    blocks: Vec<u32>,
}

impl HeldBlocks {
    /// No blocks of `pool`.
    pub fn none(pool: &BlockPool) -> Self {
        Self { pool: pool.clone(), blocks: Vec::new() }
    }

    /// The blocks.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }
}

impl Drop for HeldBlocks {
    fn drop(&mut self) {
        let mut pool = self.pool.lock();
        // Last block first, as tables do.
        self.blocks.iter().rev().for_each(|block| pool.release(*block));
    }
}

impl Blocks {
    /// Appends `count` blocks with undefined contents, held by the caller; evicts least recently used cached prefixes
    /// if necessary. If there are too few, appends all there are and returns false.
    pub fn allocate(&mut self, count: usize, blocks: &mut BlockList) -> bool {
        for _ in 0..count {
            let Some(id) = self.free.pop().or_else(|| self.idle.pop_oldest()) else { return false };
            self.look_ahead();
            self.named.iter_mut().for_each(|named| named.leave(id));
            self.index.remove(id);
            self.index.expect_entry(id);
            self.holders[id as usize] = 1;
            blocks.push(id);
        }
        true
    }

    /// Prefetches the memory that later evictions need, in two stages: the second reads what the first fetched.
    fn look_ahead(&self) {
        if let Some(later) = self.idle.ahead(2 * LOOKAHEAD) {
            self.idle.expect(later);
            self.index.expect_lookup(later);
        }
        if let Some(later) = self.idle.ahead(LOOKAHEAD) {
            self.index.expect_removal(later);
        }
    }

    /// The indexed block with this key, now also held by the caller, and its node.
    pub fn lookup(&mut self, key: Key<'_>) -> Option<(u32, Node)> {
        let (id, node) = self.index.find(key)?;
        self.idle.remove(id);
        self.holders[id as usize] += 1;
        Some((id, node))
    }

    /// Adds `blocks` of a sequence to the index, the first one after `parent`, and appends their nodes.
    /// If another block holds the same tokens, that one stays in the index. Also names them, if blocks have names, and
    /// `names`, to which they are appended, is given.
    pub fn register(
        &mut self,
        parent: Parent,
        blocks: FullBlocks<'_>,
        nodes: &mut Vec<Node>,
        names: Option<&mut Vec<ContentName>>,
    ) {
        let first = nodes.len();
        self.index.enter(parent.node, blocks.ids, blocks.tokens, nodes);
        let Some((named, names)) = self.named.as_mut().zip(names) else { return };
        let first_name = names.len();
        named.extend(parent, blocks, names);
        let parent_is_named = match parent.node {
            Node::Root { .. } => true,
            Node::Block(serial) => {
                let block = parent.name.and_then(|name| named.block(name));
                block.and_then(|block| self.index.serial(block)) == Some(serial)
            }
        };
        if !parent_is_named {
            // The parent was evicted and maybe computed again, so no request finds these blocks.
            return;
        }
        let entered = |i: usize| self.index.node(blocks.ids[i]) == Some(nodes[first + i]);
        named.enter(parent, blocks, &names[first_name..], entered);
    }

    /// Name of a block in the index, which follows `parent` and has these tokens and images, if blocks have names.
    pub fn name(
        &self,
        id: u32,
        parent: Parent,
        tokens: &[u32],
        images: impl FnOnce() -> BlockImages,
    ) -> Option<ContentName> {
        let named = self.named.as_ref()?;
        named.of(id).or_else(|| Some(named.next(parent, tokens, images().as_deref().unwrap_or_default())))
    }

    /// Releases the caller's hold on block `id`.
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
            named: None,
        };
        let (images, resets) = (Arc::default(), Arc::default());
        Self { blocks: Arc::new(Mutex::new(blocks)), images, resets, total, block_tokens }
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

    /// Number of blocks that can be allocated now, including cached prefixes without holders.
    pub fn available(&self) -> usize {
        let blocks = self.lock();
        blocks.free.len() + blocks.idle.len()
    }

    /// Length in tokens of the longest cached prefix of `tokens`, for requests of this root: as many tokens as a new
    /// table would find now, at most all but the last. Changes nothing, not even the order of eviction, and holds the
    /// lock for [`PROBED_AT_ONCE`] blocks at a time.
    pub fn cached_prefix(&self, root: impl Into<PrefixRoot>, tokens: &[u32]) -> usize {
        let (mut parent, mut found) = (Node::from(root.into()), 0);
        'probe: for tokens in tokens.chunks(PROBED_AT_ONCE * self.block_tokens) {
            let blocks = self.lock();
            for tokens in tokens.chunks_exact(self.block_tokens) {
                // A node is never reused: if its block is evicted between two locks, its children are not found.
                let Some((_, node)) = blocks.index.find(Key { parent, tokens }) else { break 'probe };
                (parent, found) = (node, found + 1);
            }
        }
        (found * self.block_tokens).min(tokens.len().saturating_sub(1))
    }

    /// Number of an image in keys of this pool's index, a new one if it has none; see [`keys`](crate::images::keys).
    /// `None` once all numbers are used.
    pub fn number_image(&self, hash: &[u8; 32]) -> Option<u32> {
        self.images().number(hash)
    }

    /// Number of an image that has one.
    pub fn image_number(&self, hash: &[u8; 32]) -> Option<u32> {
        self.images().get(hash)
    }

    fn images(&self) -> MutexGuard<'_, ImageNumbers> {
        self.images.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives blocks content names from now on, and returns how. Called before the first request; blocks that have names
    /// keep theirs.
    pub fn name_blocks(&self, naming: Naming) -> Naming {
        self.lock().named.get_or_insert_with(|| Named::new(naming, self.total)).naming.clone()
    }

    /// Keeps the block of this name in `held`, and returns it; `None` if it is not in the index any more.
    pub(super) fn hold_named(&self, name: ContentName, held: &mut HeldBlocks) -> Option<u32> {
        let blocks = &mut *self.lock();
        let id = blocks.named.as_ref()?.block(name)?;
        blocks.idle.remove(id);
        blocks.holders[id as usize] += 1;
        held.blocks.push(id);
        Some(id)
    }

    /// Logs what enters and leaves the index from now on, up to `capacity` names between two calls of
    /// [`take_changes`](Self::take_changes). Blocks must have names.
    pub fn watch_changes(&self, capacity: usize) {
        self.lock().named.iter_mut().for_each(|named| named.log = Some(ChangeLog::new(capacity)));
    }

    /// True if changes are logged.
    pub(super) fn is_watched(&self) -> bool {
        self.lock().named.as_ref().is_some_and(|named| named.log.is_some())
    }

    /// Logs a change outside the pool.
    pub(super) fn log_change(&self, change: KvChange) {
        if let Some(log) = self.lock().named.as_mut().and_then(|named| named.log.as_mut()) {
            log.push(change);
        }
    }

    /// The changes since the last call; empties the log.
    pub fn take_changes(&self) -> Changes {
        self.lock().named.as_mut().map(Named::take_changes).unwrap_or_default()
    }

    /// Everything that can be found in the index now, parents first; empties the log of changes.
    pub fn stored_runs(&self) -> Vec<StoredRun> {
        let blocks = &mut *self.lock();
        let Some(named) = &mut blocks.named else { return Vec::new() };
        named.take_changes();
        let index = &blocks.index;
        let entry = |id: u32| Some((index.serial(id)?, id));
        let mut entries: Vec<(u64, u32)> =
            (0..self.total as u32).filter(|id| named.of(*id).is_some()).filter_map(entry).collect();
        entries.sort_unstable();
        // Names by serial number, of blocks whose parents are all in the index.
        let mut found: HashMap<u64, ContentName> = HashMap::with_capacity(entries.len());
        let mut runs: Vec<StoredRun> = Vec::new();
        for (serial, id) in entries {
            let parent = match index.parent(id) {
                Node::Root { .. } => None,
                Node::Block(parent) => match found.get(&parent) {
                    Some(name) => Some(*name),
                    None => continue,
                },
            };
            let Some(name) = named.of(id) else { continue };
            found.insert(serial, name);
            match runs.last_mut().filter(|run| parent.is_some() && run.names.last() == parent.as_ref()) {
                Some(run) => {
                    run.names.push(name);
                    run.tokens.extend_from_slice(index.tokens(id));
                    run.images.push(named.images_of(id));
                }
                None => runs.push(StoredRun {
                    medium: Medium::Device,
                    root: named.root_of(id),
                    parent,
                    names: vec![name],
                    tokens: index.tokens(id).to_vec(),
                    images: vec![named.images_of(id)],
                }),
            }
        }
        runs
    }

    /// Locks the bookkeeping, for several operations at once.
    pub(super) fn lock(&self) -> MutexGuard<'_, Blocks> {
        // No user code runs under the lock, so a poisoned pool is still consistent.
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Clears the prefix index: no prefix added earlier is found again. Held blocks stay with their holders and become
    /// free, not cached, afterwards.
    pub fn forget_prefixes(&self) {
        let blocks = &mut *self.lock();
        self.resets.fetch_add(1, Ordering::Relaxed);
        blocks.index.clear();
        blocks.named.iter_mut().for_each(Named::clear);
        while let Some(id) = blocks.idle.pop_oldest() {
            blocks.free.push(id);
        }
    }

    /// Number of times that the prefix index was cleared. Only compared by the thread that clears it.
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
