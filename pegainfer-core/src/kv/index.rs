//! The prefix index: which block holds which tokens.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

/// Words of a key besides its tokens: the kind of its parent, and its number.
const PARENT_WORDS: usize = 3;

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
pub(super) struct Key<'a> {
    pub parent: Node,
    /// As many as a block has.
    pub tokens: &'a [u32],
}

/// Multilinear hash of keys: strongly universal over words of 32 bits (Lemire and Kaser, "Strongly universal string hashing is fast",
/// The Computer Journal 2014). Its factors are random, so that no client can choose prompts of one bucket.
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

    /// 32 bits, of which each has the same chance.
    fn hash(&self, key: Key<'_>) -> u32 {
        let (kind, number) = match key.parent {
            Node::Root(salt) => (0, salt),
            Node::Block(serial) => (1, serial),
        };
        let (parent, tokens) = self.factors.split_at(1 + PARENT_WORDS);
        let term = |factor: u64, word: u32| factor.wrapping_mul(u64::from(word));
        let mut sum = parent[0].wrapping_add(term(parent[1], kind));
        sum = sum.wrapping_add(term(parent[2], number as u32)).wrapping_add(term(parent[3], (number >> 32) as u32));
        for (&factor, &token) in tokens.iter().zip(key.tokens) {
            sum = sum.wrapping_add(term(factor, token));
        }
        (sum >> 32) as u32
    }
}

#[derive(Debug)]
struct Entry {
    parent: Node,
    serial: u64,
    bucket: u32,
}

/// Fewest buckets for each block of the pool.
const BUCKETS_PER_BLOCK: usize = 4;

/// No block.
const NONE: u32 = u32::MAX;

/// A hash table from keys to the blocks of a pool, each of which it has at most once. Entries lie at the index of their
/// block, those of a bucket form a chain: nothing ever moves. A `HashMap` of a full pool, in which as many entries come
/// as go, has to clean up after some thousand blocks, and every request waits the 5 to 10 ms that this takes.
#[derive(Debug)]
pub(super) struct Index {
    hasher: Multilinear,
    /// First block of each bucket, or [`NONE`]. Their number is a power of two, and several times that of the blocks: most
    /// searches are for keys that nobody has, and end at an empty bucket without a look at another block.
    buckets: Vec<u32>,
    /// By block.
    entries: Vec<Option<Entry>>,
    /// Tokens of the entries, `[blocks, block_tokens]`.
    tokens: Vec<u32>,
    block_tokens: usize,
    /// By block with an entry: the next one of its bucket, or [`NONE`].
    next: Vec<u32>,
    next_serial: u64,
}

impl Index {
    /// An empty index of a pool of `blocks` blocks of `block_tokens` tokens.
    pub fn new(blocks: usize, block_tokens: usize) -> Self {
        Self {
            hasher: Multilinear::new(block_tokens),
            buckets: vec![NONE; (BUCKETS_PER_BLOCK * blocks).next_power_of_two()],
            entries: (0..blocks).map(|_| None).collect(),
            tokens: vec![0; blocks * block_tokens],
            block_tokens,
            next: vec![NONE; blocks],
            next_serial: 0,
        }
    }

    /// The block with this key, and its node.
    pub fn find(&self, key: Key<'_>) -> Option<(u32, Node)> {
        self.search(self.bucket(key), key)
    }

    /// Whether `block` has an entry.
    pub fn has(&self, block: u32) -> bool {
        self.entries[block as usize].is_some()
    }

    /// Enters `block`, which must not have an entry, and returns its node; or that of another block with this key.
    pub fn enter(&mut self, block: u32, key: Key<'_>) -> Node {
        let bucket = self.bucket(key);
        if let Some((_, node)) = self.search(bucket, key) {
            return node;
        }
        debug_assert!(!self.has(block), "a block was registered twice");
        let serial = self.next_serial;
        self.next_serial += 1;
        self.entries[block as usize] = Some(Entry { parent: key.parent, serial, bucket: bucket as u32 });
        self.tokens[block as usize * self.block_tokens..][..self.block_tokens].copy_from_slice(key.tokens);
        self.next[block as usize] = std::mem::replace(&mut self.buckets[bucket], block);
        Node::Block(serial)
    }

    /// Takes the entry of `block` out, if it has one.
    pub fn remove(&mut self, block: u32) {
        let Some(Entry { bucket, .. }) = self.entries[block as usize].take() else { return };
        let (next, bucket) = (self.next[block as usize], bucket as usize);
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

    /// Takes every entry out. Their serial numbers are not used again.
    pub fn clear(&mut self) {
        self.buckets.fill(NONE);
        self.entries.fill_with(|| None);
    }

    /// Whether every entry, and nothing else, is in its bucket; for tests.
    pub fn is_consistent(&self) -> bool {
        let reachable = (0..self.buckets.len()).flat_map(|bucket| self.chain(bucket).map(move |found| (bucket, found)));
        let placed = reachable.filter(|(bucket, (_, entry))| entry.bucket as usize == *bucket).count();
        placed == self.entries.iter().flatten().count()
    }

    fn bucket(&self, key: Key<'_>) -> usize {
        self.hasher.hash(key) as usize & (self.buckets.len() - 1)
    }

    fn search(&self, bucket: usize, key: Key<'_>) -> Option<(u32, Node)> {
        let tokens = |block: u32| &self.tokens[block as usize * self.block_tokens..][..self.block_tokens];
        let holds = |(block, entry): &(u32, &Entry)| entry.parent == key.parent && tokens(*block) == key.tokens;
        let (block, entry) = self.chain(bucket).find(holds)?;
        Some((block, Node::Block(entry.serial)))
    }

    /// The blocks of a bucket.
    fn chain(&self, bucket: usize) -> impl Iterator<Item = (u32, &Entry)> {
        let at = |block: u32| Some((block, self.entries.get(block as usize)?.as_ref()?));
        std::iter::successors(at(self.buckets[bucket]), move |(block, _)| at(self.next[*block as usize]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng;
    use std::collections::HashMap;

    #[test]
    fn it_has_what_a_map_has() {
        const BLOCKS: u32 = 64;
        let mut index = Index::new(BLOCKS as usize, 3);
        // Few buckets, so that chains are long.
        index.buckets.truncate(4);
        let mut expected: HashMap<Key<'_>, (u32, Node)> = HashMap::new();
        let tokens: Vec<[u32; 3]> = (0..300).map(|i| [i / 3; 3]).collect();
        let key = |i: u64| Key { parent: Node::Root(i % 3), tokens: &tokens[i as usize] };
        for i in 0..20_000 {
            let (block, key) = (rng::bits(1, i) as u32 % BLOCKS, key(rng::bits(2, i) % 300));
            assert_eq!(index.find(key), expected.get(&key).copied());
            if index.has(block) {
                index.remove(block);
                expected.retain(|_, (held, _)| *held != block);
            } else {
                let node = index.enter(block, key);
                let (_, entered) = expected.entry(key).or_insert((block, node));
                assert_eq!(node, *entered, "an equal key keeps its block");
            }
            assert!(index.is_consistent(), "after {i} changes");
        }
        assert!(expected.len() > BLOCKS as usize / 4, "{} entries are no test", expected.len());
        index.clear();
        assert!(index.is_consistent() && expected.keys().all(|key| index.find(*key).is_none()));
        let before = index.next_serial - 1;
        assert_ne!(index.enter(0, key(0)), Node::Block(before), "names are not used again");
    }
}
