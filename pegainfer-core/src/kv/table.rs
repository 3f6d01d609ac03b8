//! Block table of one request.

use super::block_ids::{BlockIds, BlockList};
use super::block_images::{BlockImages, images_of};
use super::index::{Key, Node};
use super::named::{FullBlocks, Parent};
use super::names::ContentName;
use super::prefix_root::PrefixRoot;
use super::{BlockPool, NO_SLOT};
use crate::images::ImageSpan;
use std::ops::Range;
use std::sync::Arc;
use thiserror::Error;

/// The pool has no block left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the KV pool is out of blocks")]
pub struct OutOfBlocks;

/// The blocks of one sequence, in token order. With blocks of `n` tokens, token `i` lies in block `i / n`, row `i % n`.
#[derive(Debug)]
pub struct BlockTable {
    pool: BlockPool,
    blocks: BlockList,
    /// Nodes of the first blocks, as many as are in the prefix index.
    nodes: Vec<Node>,
    /// Names of the first blocks, if the pool's blocks have names.
    names: Vec<ContentName>,
    /// Number of times the index had been cleared when the first block entered it.
    resets: u64,
    /// Number of tokens whose KV other tables may read, because it was found in the cache.
    shared_tokens: usize,
    root: PrefixRoot,
    /// Images of the sequence, for the names.
    images: Arc<[ImageSpan]>,
}

impl BlockTable {
    /// An empty table. Prefixes are shared between tables of the same `root` only.
    pub fn new(pool: &BlockPool, root: impl Into<PrefixRoot>) -> Self {
        let (pool, root) = (pool.clone(), root.into());
        let (nodes, names, images) = (Vec::new(), Vec::new(), Arc::default());
        Self { pool, blocks: BlockList::default(), nodes, names, resets: 0, shared_tokens: 0, root, images }
    }

    /// The same table for a sequence with these images, in the order of the prompt. Instead of its tokens, the table is
    /// then given their [keys](crate::images::keys).
    pub fn with_images(mut self, images: Arc<[ImageSpan]>) -> Self {
        self.images = images;
        self
    }

    /// Reserves memory for the bookkeeping of `tokens` tokens.
    pub fn reserve(&mut self, tokens: usize) {
        let blocks = tokens.div_ceil(self.block_tokens());
        self.blocks.reserve(blocks);
        self.nodes.reserve_exact(blocks);
    }

    /// Fills an empty table with the longest cached prefix of `tokens` and returns its length in tokens. At most all
    /// but the last token, which is computed for its logits even if its KV is cached.
    pub fn match_prefix(&mut self, tokens: &[u32]) -> usize {
        assert!(self.blocks().is_empty(), "a prefix can only be matched into an empty table");
        self.resets = self.pool.resets();
        let mut pool = self.pool.lock();
        let size = self.pool.block_tokens();
        for (i, tokens) in tokens.chunks_exact(size).enumerate() {
            let parent = self.parent();
            let Some((block, node)) = pool.lookup(Key { parent: parent.node, tokens }) else { break };
            self.blocks.push(block);
            self.nodes.push(node);
            let images = || images_of(&self.images, i * size..(i + 1) * size);
            self.names.extend(pool.name(block, parent, tokens, images));
        }
        drop(pool);
        self.shared_tokens = self.blocks().len() * self.block_tokens();
        self.shared_tokens.min(tokens.len().saturating_sub(1))
    }

    /// Blocks missing for `tokens` tokens.
    #[inline]
    pub fn missing(&self, tokens: usize) -> usize {
        let lacking = tokens.saturating_sub(self.blocks().len() * self.block_tokens());
        if lacking == 0 { 0 } else { lacking.div_ceil(self.block_tokens()) }
    }

    /// Allocates until `tokens` tokens fit. On failure, blocks allocated so far stay in the table.
    #[inline]
    pub fn grow(&mut self, tokens: usize) -> Result<(), OutOfBlocks> {
        let missing = self.missing(tokens);
        if missing == 0 { Ok(()) } else { self.allocate(missing) }
    }

    fn allocate(&mut self, blocks: usize) -> Result<(), OutOfBlocks> {
        if self.pool.lock().allocate(blocks, &mut self.blocks) { Ok(()) } else { Err(OutOfBlocks) }
    }

    /// Adds every block that is now full to the prefix index: the KV of `computed` (all tokens so far) is written.
    #[inline]
    pub fn register(&mut self, computed: &[u32]) {
        if computed.len() >= (self.nodes.len() + 1) * self.block_tokens() {
            self.register_full(computed);
        }
    }

    fn register_full(&mut self, computed: &[u32]) {
        let (known, size) = (self.nodes.len(), self.block_tokens());
        if known == 0 {
            self.resets = self.pool.resets();
        }
        let full = computed.len() / size;
        let parent = self.parent();
        let ids: Vec<u32> = self.blocks().range(known..full).collect();
        let images = self.images_of_blocks(known..full);
        let blocks = FullBlocks { ids: &ids, tokens: &computed[known * size..full * size], images: &images };
        // No request can find blocks that follow forgotten ones.
        let names = (self.resets == self.pool.resets()).then_some(&mut self.names);
        self.pool.lock().register(parent, blocks, &mut self.nodes, names);
    }

    /// The images of each of these blocks; empty if the sequence has none.
    fn images_of_blocks(&self, blocks: Range<usize>) -> Vec<BlockImages> {
        if self.images.is_empty() {
            return Vec::new();
        }
        let size = self.block_tokens();
        blocks.map(|at| images_of(&self.images, at * size..(at + 1) * size)).collect()
    }

    /// What follows the blocks that are in the index.
    fn parent(&self) -> Parent {
        let node = self.nodes.last().copied().unwrap_or(self.root.into());
        Parent { node, root: self.root, name: self.names.last().copied() }
    }

    /// Name of the prefix of `tokens` tokens, whole blocks of them, for state other than KV. Equal prefixes of one root
    /// have equal names while their blocks are in the index, and a name is never used again. `None` while the prefix is
    /// not in the index, and for good if the index was cleared since the first block entered it, because no request can
    /// find later blocks.
    pub fn prefix(&self, tokens: usize) -> Option<u64> {
        if self.resets != self.pool.resets() {
            return None;
        }
        match self.nodes.get((tokens / self.block_tokens()).checked_sub(1)?)? {
            Node::Block(serial) => Some(*serial),
            Node::Root { .. } => None,
        }
    }

    /// Names of the first blocks, as many as are in the prefix index; none if the pool's blocks have no names.
    pub fn names(&self) -> &[ContentName] {
        &self.names
    }

    /// Releases the blocks after the first `tokens` tokens, which are whole blocks.
    pub fn truncate(&mut self, tokens: usize) {
        let keep = tokens / self.block_tokens();
        self.release_from(keep);
        self.blocks.truncate(keep);
        self.nodes.truncate(keep);
        self.names.truncate(keep);
        self.shared_tokens = self.shared_tokens.min(self.blocks().len() * self.block_tokens());
    }

    /// Releases the blocks from number `first` on to the pool; they stay in the list.
    fn release_from(&self, first: usize) {
        if first < self.blocks().len() {
            let mut pool = self.pool.lock();
            // Last block first, so that eviction takes the end of a prefix before its start.
            self.blocks().range(first..self.blocks().len()).rev().for_each(|block| pool.release(block));
        }
    }

    /// The pool of its blocks.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Root of the sequence.
    pub fn root(&self) -> PrefixRoot {
        self.root
    }

    /// Tokens of a block.
    #[inline]
    pub fn block_tokens(&self) -> usize {
        self.pool.block_tokens()
    }

    /// The blocks, in token order: their places in the device's KV buffer.
    #[inline]
    pub fn blocks(&self) -> &BlockIds {
        self.blocks.ids()
    }

    /// Appends the KV slot of each of the tokens at `positions`: `block * n + row` for blocks of `n` tokens, or
    /// [`NO_SLOT`] if its KV is already cached.
    #[inline]
    pub fn write_slots(&self, positions: Range<usize>, slots: &mut Vec<u32>) {
        let (size, Range { start, end }) = (self.block_tokens(), positions);
        // Usually the newest token, whose block is found without a division.
        let first_of_last = self.blocks().len().saturating_sub(1) * size;
        match self.blocks().last() {
            Some(block) if end - start == 1 && start >= first_of_last.max(self.shared_tokens) => {
                debug_assert!(end <= first_of_last + size, "the table has a block for the token");
                slots.push(block * size as u32 + (start - first_of_last) as u32);
            }
            _ => self.write_many_slots(start..end, slots),
        }
    }

    fn write_many_slots(&self, Range { start, end }: Range<usize>, slots: &mut Vec<u32>) {
        let size = self.block_tokens();
        let computed = start.max(self.shared_tokens.min(end));
        slots.resize(slots.len() + computed - start, NO_SLOT);
        let (mut at, mut row) = (computed, computed % size);
        let first = (computed / size).min(self.blocks().len());
        for block in self.blocks().range(first..self.blocks().len()) {
            if at == end {
                break;
            }
            let (first, rows) = (block * size as u32 + row as u32, (size - row).min(end - at));
            slots.extend(first..first + rows as u32);
            (at, row) = (at + rows, 0);
        }
    }

    /// Releases all blocks.
    pub fn clear(&mut self) {
        self.truncate(0);
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        self.release_from(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(seed: u32, n: usize) -> Vec<u32> {
        (0..n as u32).map(|i| seed * 1000 + i).collect()
    }

    #[test]
    fn a_second_request_finds_the_full_blocks_of_the_first() {
        let pool = BlockPool::new(8, 16);
        let prompt = tokens(1, 40);
        let mut first = BlockTable::new(&pool, 0);
        assert_eq!(first.match_prefix(&prompt), 0);
        first.grow(40).unwrap();
        first.register(&prompt);

        let mut second = BlockTable::new(&pool, 0);
        assert_eq!(second.match_prefix(&prompt), 32, "the ragged tail is not shared");
        assert_eq!(second.blocks().at(0), first.blocks().at(0));
        let mut other_salt = BlockTable::new(&pool, 7);
        assert_eq!(other_salt.match_prefix(&prompt), 0);
        drop(first);
        pool.check(2).unwrap();
        drop(second);
        pool.check(0).unwrap();
        assert_eq!(pool.available(), 8);

        let mut exact = BlockTable::new(&pool, 0);
        assert_eq!(exact.match_prefix(&prompt[..32]), 31, "one token is left to compute");
        exact.grow(33).unwrap();
        let mut slots = Vec::new();
        exact.write_slots(31..33, &mut slots);
        assert_eq!(slots, [NO_SLOT, exact.blocks().at(2) * 16], "the first two blocks are shared");
        exact.grow(70).unwrap();
        for range in [0..70, 31..32, 33..34, 35..48, 40..70, 48..64] {
            slots.clear();
            exact.write_slots(range.clone(), &mut slots);
            let slot = |i: usize| if i < 32 { NO_SLOT } else { exact.blocks().at(i / 16) * 16 + (i % 16) as u32 };
            assert_eq!(slots, range.map(slot).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_prefix_has_a_name_and_can_be_cut() {
        let pool = BlockPool::new(8, 16);
        let prompt = tokens(1, 49);
        let mut first = BlockTable::new(&pool, 0);
        first.grow(49).unwrap();
        assert_eq!(first.prefix(16), None);
        first.register(&prompt);
        let names: Vec<_> = [16, 32, 48].map(|n| first.prefix(n).unwrap()).into();
        assert!(names[0] != names[1] && names[1] != names[2]);
        assert_eq!((first.prefix(0), first.prefix(64)), (None, None));

        let mut second = BlockTable::new(&pool, 0);
        assert_eq!(second.match_prefix(&prompt), 48);
        second.truncate(32);
        assert_eq!((second.prefix(32), second.prefix(48)), (Some(names[1]), None));
        second.grow(49).unwrap();
        second.register(&prompt);
        assert_eq!(second.prefix(48), Some(names[2]), "the same tokens have the same name");
        pool.check(6).unwrap();
        drop((first, second));
        pool.check(0).unwrap();
    }

    #[test]
    fn eviction_takes_the_tail_of_the_oldest_prefix_first() {
        let pool = BlockPool::new(4, 16);
        for seed in [1, 2] {
            let prompt = tokens(seed, 32);
            let mut table = BlockTable::new(&pool, 0);
            table.grow(32).unwrap();
            table.register(&prompt);
        }
        let mut taker = BlockTable::new(&pool, 0);
        taker.grow(1).unwrap();
        let longer = |seed| tokens(seed, 33);
        let mut table = BlockTable::new(&pool, 0);
        assert_eq!(table.match_prefix(&longer(1)), 16, "the head of the older prefix survives");
        let mut table = BlockTable::new(&pool, 0);
        assert_eq!(table.match_prefix(&longer(2)), 32);
    }

    #[test]
    fn a_pool_that_is_out_of_blocks_says_so_and_leaks_nothing() {
        let pool = BlockPool::new(2, 16);
        let mut table = BlockTable::new(&pool, 0);
        assert_eq!(table.grow(33), Err(OutOfBlocks));
        pool.check(2).unwrap();
        drop(table);
        pool.check(0).unwrap();
    }

    #[test]
    fn forgotten_prefixes_are_not_found_and_held_blocks_stay() {
        let pool = BlockPool::new(8, 16);
        let (held, idle) = (tokens(1, 48), tokens(2, 32));
        let mut holder = BlockTable::new(&pool, 0);
        holder.grow(48).unwrap();
        holder.register(&held[..32]);
        let mut gone = BlockTable::new(&pool, 0);
        gone.grow(32).unwrap();
        gone.register(&idle);
        drop(gone);

        pool.forget_prefixes();
        pool.check(3).unwrap();
        assert_eq!(pool.available(), 5);
        for prompt in [&held, &idle] {
            assert_eq!(BlockTable::new(&pool, 0).match_prefix(prompt), 0);
        }
        // Blocks that the holder computes from here on follow blocks that cannot be found.
        holder.register(&held);
        assert_eq!([16, 48].map(|tokens| holder.prefix(tokens)), [None, None], "a name that nobody can ask for");
        assert_eq!(BlockTable::new(&pool, 0).match_prefix(&tokens(1, 49)), 0);
        drop(holder);
        pool.check(0).unwrap();
        let mut taker = BlockTable::new(&pool, 0);
        taker.grow(8 * 16).unwrap();
        pool.check(8).unwrap();
    }

    #[test]
    fn equal_blocks_computed_twice_share_one_entry() {
        let pool = BlockPool::new(8, 16);
        let prompt = tokens(3, 32);
        let mut a = BlockTable::new(&pool, 0);
        let mut b = BlockTable::new(&pool, 0);
        for table in [&mut a, &mut b] {
            table.grow(32).unwrap();
            table.register(&prompt);
        }
        drop(a);
        drop(b);
        pool.check(0).unwrap();
        // Every block can be allocated again, including the indexed ones.
        let mut taker = BlockTable::new(&pool, 0);
        taker.grow(8 * 16).unwrap();
        pool.check(8).unwrap();
    }
}
