//! The log of what enters and leaves the prefix index, for routers that follow it.

use super::block_images::BlockImages;
use super::names::ContentName;
use super::prefix_root::PrefixRoot;
use std::collections::VecDeque;

/// Where a copy of a block lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Medium {
    /// Memory of the device, where steps read it.
    Device,
    /// Memory of the host.
    Host,
    /// A file.
    Disk,
}

/// Consecutive full blocks of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredRun {
    /// Where they lie.
    pub medium: Medium,
    /// Root of their sequence.
    pub root: PrefixRoot,
    /// The block before the first one; `None` at the start of a sequence.
    pub parent: Option<ContentName>,
    /// Their names.
    pub names: Vec<ContentName>,
    /// Their tokens, `[names, tokens of a block]`. Tokens of images are [keys](crate::images::keys).
    pub tokens: Vec<u32>,
    /// The images of each block, `[names]`.
    pub images: Vec<BlockImages>,
}

/// A change of what is cached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvChange {
    /// Blocks can be found from now on.
    Stored(StoredRun),
    /// Blocks are gone.
    Removed {
        /// Where they lay.
        medium: Medium,
        /// Their names.
        names: Vec<ContentName>,
    },
    /// No block is left, in any medium.
    Cleared,
}

/// Changes since the last time, in order.
#[derive(Debug, Default)]
pub struct Changes {
    /// True if the log was full, so that later changes are missing.
    pub lost: bool,
    /// The changes that were kept.
    pub list: Vec<KvChange>,
}

/// A bounded log of changes.
#[derive(Debug)]
pub(super) struct ChangeLog {
    changes: VecDeque<KvChange>,
    /// Maximum number of names in the log.
    capacity: usize,
    /// Number of names in the log.
    names: usize,
    lost: bool,
}

impl ChangeLog {
    /// An empty log of up to `capacity` names.
    pub fn new(capacity: usize) -> Self {
        Self { changes: VecDeque::new(), capacity, names: 0, lost: false }
    }

    /// Adds a change, unless the log is full.
    pub fn push(&mut self, change: KvChange) {
        let names = match &change {
            KvChange::Stored(run) => run.names.len(),
            KvChange::Removed { names, .. } => names.len(),
            KvChange::Cleared => {
                // Nothing before it matters.
                self.changes.clear();
                (self.names, self.lost) = (0, false);
                1
            }
        };
        if self.lost || self.names + names > self.capacity {
            self.lost = true;
            return;
        }
        self.names += names;
        match (self.changes.back_mut(), change) {
            (Some(KvChange::Removed { medium: before, names: removed }), KvChange::Removed { medium, names })
                if *before == medium =>
            {
                removed.extend(names)
            }
            (_, change) => self.changes.push_back(change),
        }
    }

    /// Empties the log.
    pub fn take(&mut self) -> Changes {
        self.names = 0;
        Changes { lost: std::mem::take(&mut self.lost), list: std::mem::take(&mut self.changes).into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::{ImageSpan, keys};
    use crate::kv::block_images::tests::span;
    use crate::kv::{BlockPool, BlockTable, Naming};
    use crate::rng;
    use std::collections::BTreeMap;
    use std::sync::Arc;

    /// What a reader of the log knows: the parent, the tokens and the images of each name.
    type Mirror = BTreeMap<ContentName, (Option<ContentName>, Vec<u32>, BlockImages)>;

    fn store(mirror: &mut Mirror, run: &StoredRun) {
        let mut parent = run.parent;
        assert_eq!(run.images.len(), run.names.len());
        let texts = run.tokens.chunks_exact(run.tokens.len() / run.names.len());
        for ((name, tokens), images) in run.names.iter().zip(texts).zip(&run.images) {
            let before = mirror.insert(*name, (parent, tokens.to_vec(), images.clone()));
            assert!(before.is_none(), "{name:?} was stored twice");
            parent = Some(*name);
        }
    }

    fn apply(mirror: &mut Mirror, changes: Changes) {
        assert!(!changes.lost);
        for change in changes.list {
            match change {
                KvChange::Stored(run) => store(mirror, &run),
                KvChange::Removed { names, .. } => {
                    names.iter().for_each(|name| assert!(mirror.remove(name).is_some(), "{name:?} was not there"));
                }
                KvChange::Cleared => mirror.clear(),
            }
        }
    }

    fn mirror_of(runs: &[StoredRun]) -> Mirror {
        let mut mirror = Mirror::new();
        runs.iter().for_each(|run| store(&mut mirror, run));
        mirror
    }

    /// A pool whose blocks have names and whose changes are logged.
    fn watched(blocks: usize, capacity: usize) -> BlockPool {
        let pool = BlockPool::new(blocks, 4);
        pool.name_blocks(Naming::new(&[1; 32], "a model"));
        pool.watch_changes(capacity);
        pool
    }

    #[test]
    fn the_log_tells_what_the_index_has() {
        let pool = watched(24, 1000);
        let (mut mirror, mut tables) = (Mirror::new(), Vec::new());
        let image: Arc<[ImageSpan]> = [span(2, 6, 1)].into();
        let (mut cleared, mut with_images) = (0, 0);
        for i in 0..20_000 {
            let choose = |n: u64, stream: u64| rng::below(rng::bits(stream, i), n) as usize;
            // Texts share beginnings of various lengths, and roots.
            let (text, fork) = (choose(3, 1) as u32, choose(32, 2));
            let prompt: Vec<u32> = (0..4 + choose(28, 3)).map(|at| if at < fork { at as u32 } else { text }).collect();
            let images = if prompt.len() > 8 && choose(3, 9) == 0 { image.clone() } else { Arc::default() };
            let prompt = keys(&images, &prompt, |hash| pool.number_image(hash));
            let mut table = BlockTable::new(&pool, choose(2, 4) as u64).with_images(images);
            table.match_prefix(&prompt);
            if table.grow(prompt.len()).is_ok() {
                table.register(&prompt);
                assert_eq!(table.names().len(), prompt.len() / 4);
                tables.push(table);
            }
            if tables.len() > 3 || choose(3, 5) == 0 {
                tables.drain(..choose(tables.len() as u64 + 1, 6));
            }
            if choose(500, 7) == 0 {
                pool.forget_prefixes();
                tables.clear();
                cleared += 1;
            }
            if choose(4, 8) == 0 {
                apply(&mut mirror, pool.take_changes());
                // A block whose parent was evicted is in the log, and not among the runs.
                let found = mirror_of(&pool.stored_runs());
                assert!(found.iter().all(|(name, entry)| mirror.get(name) == Some(entry)), "after {i} requests");
                with_images += found.values().filter(|(_, _, images)| images.is_some()).count();
                let orphans = mirror.iter().filter(|(name, _)| !found.contains_key(*name));
                for (name, (parent, ..)) in orphans {
                    assert!(parent.is_some_and(|parent| !found.contains_key(&parent)), "{name:?} has its parent");
                }
            }
        }
        assert!(cleared > 10 && with_images > 100 && !mirror.is_empty());
    }

    #[test]
    fn equal_texts_have_equal_names_in_every_pool() {
        let names = |prompts: &[&[u32]]| {
            let pool = watched(8, 1000);
            let table_of = |prompt: &[u32]| {
                let mut table = BlockTable::new(&pool, 0);
                table.match_prefix(prompt);
                table.grow(prompt.len()).unwrap();
                table.register(prompt);
                table.names().to_vec()
            };
            prompts.iter().map(|prompt| table_of(prompt)).collect::<Vec<_>>()
        };
        let (short, long) = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 0, 10, 11, 12]);
        let (first, second) = (names(&[&short, &long]), names(&[&long, &short]));
        assert_eq!((&first[0], &first[1]), (&second[1], &second[0]));
        assert_eq!((first[0].as_slice(), first[1].len()), (&first[1][..2], 3));
    }

    #[test]
    fn a_full_log_says_so_and_the_next_dump_is_whole() {
        let pool = watched(16, 5);
        let register = |start: u32, tokens: u32| {
            let prompt: Vec<u32> = (start..start + tokens).collect();
            let mut table = BlockTable::new(&pool, 0);
            table.grow(prompt.len()).unwrap();
            table.register(&prompt);
        };
        register(0, 16);
        register(100, 16);
        let changes = pool.take_changes();
        assert!(changes.lost && changes.list.len() == 1);
        register(200, 4);
        assert_eq!(pool.stored_runs().iter().map(|run| run.names.len()).sum::<usize>(), 9);
        let changes = pool.take_changes();
        assert!(!changes.lost && changes.list.is_empty(), "a dump has everything before it");
        register(300, 16);
        register(400, 16);
        pool.forget_prefixes();
        let changes = pool.take_changes();
        assert_eq!((changes.lost, changes.list), (false, vec![KvChange::Cleared]));
    }

    #[test]
    fn blocks_computed_after_a_reset_behind_forgotten_ones_are_not_told() {
        let pool = watched(8, 1000);
        let prompt: Vec<u32> = (0..12).collect();
        let mut table = BlockTable::new(&pool, 0);
        table.grow(12).unwrap();
        table.register(&prompt[..4]);
        pool.forget_prefixes();
        pool.take_changes();
        table.register(&prompt);
        assert!(pool.take_changes().list.is_empty() && pool.stored_runs().is_empty());
        drop(table);
        let mut taker = BlockTable::new(&pool, 0);
        taker.grow(32).unwrap();
        assert!(pool.take_changes().list.is_empty(), "nobody knows the evicted block");
    }
}
