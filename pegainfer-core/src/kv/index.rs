//! The prefix index: from tokens to the blocks that hold their KV.

use super::prefix_root::PrefixRoot;
use crate::adapter::AdapterId;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

/// Words of a key other than its tokens: kind and number of its parent.
const PARENT_WORDS: usize = 3;

/// Identity of an indexed block: never reused, so a child entry can never be reached through another parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Node {
    /// Start of every sequence with this [`PrefixRoot`].
    Root { salt: u64, adapter: Option<AdapterId> },
    /// The block registered with this serial number.
    Block(u64),
}

impl From<PrefixRoot> for Node {
    fn from(PrefixRoot { salt, adapter }: PrefixRoot) -> Self {
        Self::Root { salt, adapter }
    }
}

/// Key of a block: its tokens, and what precedes them. Keys are compared whole, so unlike with a hash chain no
/// collision can serve one prompt the KV of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key<'a> {
    pub parent: Node,
    /// Tokens of one full block.
    pub tokens: &'a [u32],
}

/// Multilinear hash of keys, strongly universal over 32-bit words (Lemire and Kaser, "Strongly universal string hashing
/// is fast", The Computer Journal 2014). Its factors are random, so that clients cannot choose prompts of one bucket.
#[derive(Debug)]
struct Multilinear {
    /// The first summand, and one factor for each word of a key.
    factors: Vec<u64>,
}

impl Multilinear {
    /// A hash of keys of `block_tokens` tokens.
    fn new(block_tokens: usize) -> Self {
        let random = RandomState::new();
        Self { factors: (0..=PARENT_WORDS + block_tokens).map(|i| random.hash_one(i)).collect() }
    }

    /// A uniformly distributed 31-bit hash.
    fn hash(&self, key: Key<'_>) -> u32 {
        let (kind, number) = match key.parent {
            // Even for roots, odd for blocks.
            Node::Root { salt, adapter } => (adapter.map_or(0, |AdapterId(id)| id.get().wrapping_mul(2)), salt),
            Node::Block(serial) => (1, serial),
        };
        let (parent, tokens) = self.factors.split_at(1 + PARENT_WORDS);
        let term = |factor: u64, word: u32| factor.wrapping_mul(u64::from(word));
        let mut sum = parent[0].wrapping_add(term(parent[1], kind));
        sum = sum.wrapping_add(term(parent[2], number as u32)).wrapping_add(term(parent[3], (number >> 32) as u32));
        // Four at a time: a loop over single tokens takes twice as many instructions.
        let (quads, rest) = key.tokens.as_chunks::<4>();
        let (factor_quads, _) = tokens.as_chunks::<4>();
        for (f, t) in factor_quads.iter().zip(quads) {
            let (even, odd) =
                (term(f[0], t[0]).wrapping_add(term(f[2], t[2])), term(f[1], t[1]).wrapping_add(term(f[3], t[3])));
            sum = sum.wrapping_add(even).wrapping_add(odd);
        }
        for (&factor, &token) in tokens[4 * quads.len()..].iter().zip(rest) {
            sum = sum.wrapping_add(term(factor, token));
        }
        (sum >> 33) as u32
    }
}

/// Number of blocks entered together, to overlap their memory reads.
const BATCH: usize = 32;

/// Minimum number of buckets per block of the pool.
const BUCKETS_PER_BLOCK: usize = 4;

/// No block.
const NONE: u32 = u32::MAX;

/// A hash table from keys to the blocks of a pool, each block at most once. Entries lie at the index of their block,
/// and those of a bucket form a chain, so nothing ever moves. A `HashMap` with constant insertion and removal has to
/// rehash after some thousand blocks, which delays every request by 5 to 10 ms.
#[derive(Debug)]
pub(super) struct Index {
    hasher: Multilinear,
    /// First block of each bucket, or [`NONE`]. Their number is a power of two, several times that of the blocks: most
    /// searches miss, and end at an empty bucket without touching a block.
    buckets: Vec<u32>,
    /// Hash of each block's key, or [`NONE`] without an entry. Data that searches and evictions need has its own short
    /// arrays, which stay in a cache.
    hashes: Vec<u32>,
    /// Next block in the bucket of each block with an entry, or [`NONE`].
    next: Vec<u32>,
    /// Parent and serial number of each block with an entry.
    nodes: Vec<(Node, u64)>,
    /// Tokens of the entries, `[blocks, block_tokens]`.
    tokens: Vec<u32>,
    block_tokens: usize,
    next_serial: u64,
}

impl Index {
    /// An empty index of a pool of `blocks` blocks of `block_tokens` tokens.
    pub fn new(blocks: usize, block_tokens: usize) -> Self {
        Self {
            hasher: Multilinear::new(block_tokens),
            buckets: vec![NONE; (BUCKETS_PER_BLOCK * blocks).next_power_of_two()],
            hashes: vec![NONE; blocks],
            next: vec![NONE; blocks],
            nodes: vec![(PrefixRoot::default().into(), 0); blocks],
            tokens: vec![0; blocks * block_tokens],
            block_tokens,
            next_serial: 0,
        }
    }

    /// The block with this key, and its node.
    pub fn find(&self, key: Key<'_>) -> Option<(u32, Node)> {
        self.search(self.hasher.hash(key), key)
    }

    /// True if `block` has an entry.
    pub fn has(&self, block: u32) -> bool {
        self.hashes[block as usize] != NONE
    }

    /// The node of a block with an entry.
    pub fn node(&self, block: u32) -> Option<Node> {
        self.serial(block).map(Node::Block)
    }

    /// The serial number of a block with an entry.
    pub fn serial(&self, block: u32) -> Option<u64> {
        self.has(block).then(|| self.nodes[block as usize].1)
    }

    /// Parent of a block with an entry.
    pub fn parent(&self, block: u32) -> Node {
        self.nodes[block as usize].0
    }

    /// Tokens of a block with an entry.
    pub fn tokens(&self, block: u32) -> &[u32] {
        &self.tokens[block as usize * self.block_tokens..][..self.block_tokens]
    }

    /// Adds `blocks`, consecutive full blocks of one sequence without entries, with their `tokens`; the first one
    /// follows `parent`. Appends their nodes, or the nodes of existing blocks with the same keys.
    pub fn enter(&mut self, parent: Node, blocks: &[u32], tokens: &[u32], nodes: &mut Vec<Node>) {
        let size = self.block_tokens;
        let mut parent = parent;
        for (blocks, tokens) in blocks.chunks(BATCH).zip(tokens.chunks(BATCH * size)) {
            // Maximum number of blocks are new and consecutive: their buckets are known before the first one is added,
            // and prefetched when they are needed.
            let mut hashes = [0; BATCH];
            for (i, (hash, tokens)) in hashes.iter_mut().zip(tokens.chunks_exact(size)).enumerate() {
                let expected = if i == 0 { parent } else { Node::Block(self.next_serial + i as u64 - 1) };
                *hash = self.hasher.hash(Key { parent: expected, tokens });
                prefetch(&self.buckets[self.bucket(*hash)]);
            }
            let first = self.next_serial;
            for (i, (block, tokens)) in blocks.iter().zip(tokens.chunks_exact(size)).enumerate() {
                let key = Key { parent, tokens };
                // No key can have a parent that is new itself.
                let follows_new = i > 0 && parent == Node::Block(first + i as u64 - 1);
                let hash = if i == 0 || follows_new { hashes[i] } else { self.hasher.hash(key) };
                let known = if follows_new { None } else { self.search(hash, key) };
                parent = known.map_or_else(|| self.insert(hash, *block, key), |(_, node)| node);
                nodes.push(parent);
            }
        }
    }

    /// Adds one block with a new key of this hash.
    fn insert(&mut self, hash: u32, block: u32, key: Key<'_>) -> Node {
        debug_assert!(!self.has(block), "a block was registered twice");
        let (serial, at) = (self.next_serial, block as usize);
        self.next_serial += 1;
        self.hashes[at] = hash;
        self.nodes[at] = (key.parent, serial);
        self.tokens[at * self.block_tokens..][..self.block_tokens].copy_from_slice(key.tokens);
        let bucket = self.bucket(hash);
        self.next[at] = std::mem::replace(&mut self.buckets[bucket], block);
        Node::Block(serial)
    }

    /// Prefetches the data for adding an entry of `block`.
    pub fn expect_entry(&self, block: u32) {
        let at = block as usize;
        prefetch(&self.nodes[at]);
        let tokens = &self.tokens[at * self.block_tokens..][..self.block_tokens];
        // One token per cache line.
        tokens.iter().step_by(16).chain(tokens.last()).for_each(prefetch);
    }

    /// Prefetches the data for [`expect_removal`](Self::expect_removal) of `block`.
    pub fn expect_lookup(&self, block: u32) {
        prefetch(&self.hashes[block as usize]);
        prefetch(&self.next[block as usize]);
    }

    /// Prefetches the data for removing the entry of `block`.
    pub fn expect_removal(&self, block: u32) {
        let hash = self.hashes[block as usize];
        prefetch(&self.buckets[self.bucket(hash)]);
    }

    /// Removes the entry of `block`, if it has one.
    pub fn remove(&mut self, block: u32) {
        let hash = std::mem::replace(&mut self.hashes[block as usize], NONE);
        if hash == NONE {
            return;
        }
        let (next, bucket) = (self.next[block as usize], self.bucket(hash));
        let mut before = self.buckets[bucket];
        if before == block {
            self.buckets[bucket] = next;
            return;
        }
        while self.next[before as usize] != block {
            before = self.next[before as usize];
        }
        self.next[before as usize] = next;
    }

    /// Removes all entries. Their serial numbers are not used again.
    pub fn clear(&mut self) {
        self.buckets.fill(NONE);
        self.hashes.fill(NONE);
    }

    /// True if every entry, and nothing else, is in its bucket; for tests.
    pub fn is_consistent(&self) -> bool {
        let reachable = (0..self.buckets.len()).flat_map(|bucket| self.chain(bucket).map(move |block| (bucket, block)));
        let placed = reachable.filter(|(bucket, block)| self.bucket(self.hashes[*block as usize]) == *bucket).count();
        placed == self.hashes.iter().filter(|hash| **hash != NONE).count()
    }

    fn bucket(&self, hash: u32) -> usize {
        hash as usize & (self.buckets.len() - 1)
    }

    fn search(&self, hash: u32, key: Key<'_>) -> Option<(u32, Node)> {
        let same = |block: u32| self.nodes[block as usize].0 == key.parent && self.tokens(block) == key.tokens;
        let block = self.chain(self.bucket(hash)).find(|block| self.hashes[*block as usize] == hash && same(*block))?;
        Some((block, Node::Block(self.nodes[block as usize].1)))
    }

    /// The blocks of a bucket.
    fn chain(&self, bucket: usize) -> impl Iterator<Item = u32> {
        let some = |block: u32| (block != NONE).then_some(block);
        std::iter::successors(some(self.buckets[bucket]), move |block| some(self.next[*block as usize]))
    }
}

/// Prefetches `value`.
#[inline]
pub(super) fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: only a hint; reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng;
    use std::collections::HashMap;
    use std::num::NonZeroU32;

    fn enter(index: &mut Index, block: u32, key: Key<'_>) -> Node {
        let mut nodes = Vec::new();
        index.enter(key.parent, &[block], key.tokens, &mut nodes);
        nodes[0]
    }

    #[test]
    fn blocks_that_are_entered_together_follow_each_other() {
        let mut index = Index::new(200, 2);
        let tokens: Vec<u32> = (0..140).collect();
        let blocks: Vec<u32> = (0..70).collect();
        let mut nodes = Vec::new();
        index.enter(PrefixRoot::from(7).into(), &blocks, &tokens, &mut nodes);
        // The first 40 are cached; the others follow another text.
        let other: Vec<u32> = (0..80).chain(500..560).collect();
        let mut of_other = Vec::new();
        index.enter(PrefixRoot::from(7).into(), &(70..140).collect::<Vec<_>>(), &other, &mut of_other);
        assert_eq!((of_other.len(), &of_other[..40]), (70, &nodes[..40]));
        assert!(of_other[40..].iter().all(|node| !nodes.contains(node)));
        for (tokens, nodes, blocks) in [(&tokens, &nodes, 0..70), (&other, &of_other, 70..140)] {
            let parents = std::iter::once(Node::from(PrefixRoot::from(7))).chain(nodes.iter().copied());
            for (i, (parent, tokens)) in parents.zip(tokens.chunks(2)).enumerate() {
                let block = if i < 40 { i as u32 } else { blocks.start + i as u32 };
                assert_eq!(index.find(Key { parent, tokens }), Some((block, nodes[i])));
            }
        }
        assert!(index.is_consistent());
    }

    #[test]
    fn it_has_what_a_map_has() {
        const BLOCKS: u32 = 64;
        let mut index = Index::new(BLOCKS as usize, 3);
        // Few buckets, so that chains are long.
        index.buckets.truncate(4);
        let mut expected: HashMap<Key<'_>, (u32, Node)> = HashMap::new();
        let tokens: Vec<[u32; 3]> = (0..300).map(|i| [i / 3; 3]).collect();
        // Roots that differ in the salt or in the adapter.
        let adapter = |i: u64| NonZeroU32::new((i % 2) as u32).map(AdapterId);
        let root = |i: u64| PrefixRoot { salt: i % 3 / 2, adapter: adapter(i % 3) };
        let key = |i: u64| Key { parent: root(i).into(), tokens: &tokens[i as usize] };
        for i in 0..20_000 {
            let (block, key) = (rng::bits(1, i) as u32 % BLOCKS, key(rng::bits(2, i) % 300));
            assert_eq!(index.find(key), expected.get(&key).copied());
            if index.has(block) {
                index.remove(block);
                expected.retain(|_, (held, _)| *held != block);
            } else {
                let node = enter(&mut index, block, key);
                let (_, entered) = expected.entry(key).or_insert((block, node));
                assert_eq!(node, *entered, "an equal key keeps its block");
            }
            assert!(index.is_consistent(), "after {i} changes");
        }
        assert!(expected.len() > BLOCKS as usize / 4, "{} entries are no test", expected.len());
        index.clear();
        assert!(index.is_consistent() && expected.keys().all(|key| index.find(*key).is_none()));
        let before = index.next_serial - 1;
        assert_ne!(enter(&mut index, 0, key(0)), Node::Block(before), "names are not used again");
    }
}
