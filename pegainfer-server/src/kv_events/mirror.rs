//! A copy of what subscribers know, so that everything can be published again.

use super::event::{Event, Run};
use pegainfer_core::adapter::AdapterId;
use pegainfer_core::images::IMAGE_KEY;
use pegainfer_core::kv::{BlockImages, ContentName, KvChange, Medium, StoredRun};
use std::collections::HashMap;
use std::sync::Arc;

/// All media, in the order of [`Block::copies`].
const MEDIA: [Medium; 3] = [Medium::Device, Medium::Host, Medium::Disk];

/// A block that is cached somewhere.
#[derive(Debug)]
struct Block {
    parent: Option<ContentName>,
    tokens: Box<[u32]>,
    images: BlockImages,
    adapter: Option<Arc<str>>,
    /// Number of copies in each medium. An index may have two for a moment, if the parent of the first one was evicted
    /// and computed again.
    copies: [u32; MEDIA.len()],
}

/// The blocks that subscribers know.
#[derive(Debug, Default)]
pub(super) struct Mirror {
    blocks: HashMap<ContentName, Block>,
    /// Id of the tokens of images, if the model reads images.
    image_token: Option<u32>,
}

/// Finds the name of an adapter.
pub(super) type AdapterNames<'a> = &'a dyn Fn(AdapterId) -> Option<String>;

fn place(medium: Medium) -> usize {
    match medium {
        Medium::Device => 0,
        Medium::Host => 1,
        Medium::Disk => 2,
    }
}

impl Mirror {
    /// A mirror without blocks. Tokens of images have this id.
    pub fn new(image_token: Option<u32>) -> Self {
        Self { blocks: HashMap::new(), image_token }
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Applies changes. Returns the events to publish, one for each run of blocks.
    ///
    /// Blocks with a salt are not published: subscribers would need the salt itself, and only its hash is kept. Blocks
    /// of an adapter without a name are not published either.
    pub fn apply(&mut self, changes: Vec<KvChange>, names: AdapterNames<'_>) -> Vec<Event> {
        let mut events = Vec::new();
        for change in changes {
            match change {
                KvChange::Stored(run) => self.store(run, names, &mut events),
                KvChange::Removed { medium, names } => self.remove(medium, &names, &mut events),
                KvChange::Cleared => {
                    self.blocks.clear();
                    // Nothing before it matters.
                    events = vec![Event::Cleared];
                }
            }
        }
        events
    }

    /// Replaces all blocks by those of `runs`.
    pub fn replace(&mut self, runs: Vec<StoredRun>, names: AdapterNames<'_>) {
        self.blocks.clear();
        for run in runs {
            self.store(run, names, &mut Vec::new());
        }
    }

    fn store(&mut self, run: StoredRun, adapters: AdapterNames<'_>, events: &mut Vec<Event>) {
        let StoredRun { medium, root, mut parent, names, mut tokens, images } = run;
        // The index has keys of images instead of their token ids.
        if let Some(id) = self.image_token {
            tokens.iter_mut().filter(|token| **token & IMAGE_KEY != 0).for_each(|token| *token = id);
        }
        if root.salt != 0 || names.is_empty() {
            return;
        }
        let adapter = match root.adapter.map(adapters) {
            None => None,
            Some(Some(name)) => Some(name.into()),
            Some(None) => return,
        };
        let first = parent;
        let blocks = names.iter().zip(tokens.chunks_exact(tokens.len() / names.len())).zip(&images);
        for ((name, tokens), images) in blocks {
            let block = self.blocks.entry(*name).or_insert_with(|| Block {
                parent,
                tokens: tokens.into(),
                images: images.clone(),
                adapter: adapter.clone(),
                copies: [0; MEDIA.len()],
            });
            block.copies[place(medium)] += 1;
            parent = Some(*name);
        }
        push_run(events, Run { medium, adapter, parent: first, names, tokens, images });
    }

    fn remove(&mut self, medium: Medium, names: &[ContentName], events: &mut Vec<Event>) {
        let mut gone = Vec::with_capacity(names.len());
        for name in names {
            let Some(block) = self.blocks.get_mut(name) else { continue };
            let copies = &mut block.copies[place(medium)];
            if *copies == 1 {
                gone.push(*name);
            }
            *copies = copies.saturating_sub(1);
            if block.copies == [0; MEDIA.len()] {
                self.blocks.remove(name);
            }
        }
        match events.last_mut() {
            _ if gone.is_empty() => {}
            Some(Event::Removed { medium: before, names }) if *before == medium => names.extend(gone),
            _ => events.push(Event::Removed { medium, names: gone }),
        }
    }

    /// Events for all blocks, parents first. A block whose parent is gone is left out, because no request finds it.
    pub fn dump(&self) -> Vec<Event> {
        let mut children: HashMap<ContentName, Vec<ContentName>> = HashMap::new();
        let mut starts = Vec::new();
        for (name, block) in &self.blocks {
            match block.parent {
                Some(parent) => children.entry(parent).or_default().push(*name),
                None => starts.push(*name),
            }
        }
        let mut events = Vec::new();
        while let Some(start) = starts.pop() {
            let mut chain = vec![start];
            let mut last = start;
            while let Some(mut next) = children.remove(&last) {
                // The others begin runs of their own, after this one.
                last = next.swap_remove(0);
                starts.extend(next);
                chain.push(last);
            }
            self.push_chain(&chain, &mut events);
        }
        events
    }

    /// Adds the events of consecutive blocks: one for each medium of those that lie in the same media.
    fn push_chain(&self, chain: &[ContentName], events: &mut Vec<Event>) {
        let media = |name: &ContentName| self.blocks.get(name).map(|block| block.copies.map(|copies| copies > 0));
        for names in chain.chunk_by(|a, b| media(a) == media(b)) {
            let blocks: Vec<&Block> = names.iter().filter_map(|name| self.blocks.get(name)).collect();
            let Some(first) = blocks.first() else { continue };
            for medium in MEDIA.into_iter().filter(|medium| first.copies[place(*medium)] > 0) {
                events.push(Event::Stored(Run {
                    medium,
                    adapter: first.adapter.clone(),
                    parent: first.parent,
                    names: names.to_vec(),
                    tokens: blocks.iter().flat_map(|block| &block.tokens).copied().collect(),
                    images: blocks.iter().map(|block| block.images.clone()).collect(),
                }));
            }
        }
    }
}

/// Adds a run of blocks to the last one, if it continues it.
fn push_run(events: &mut Vec<Event>, run: Run) {
    match events.last_mut() {
        Some(Event::Stored(last))
            if (last.medium, &last.adapter) == (run.medium, &run.adapter)
                && run.parent.is_some()
                && last.names.last() == run.parent.as_ref() =>
        {
            last.names.extend(run.names);
            last.tokens.extend(run.tokens);
            last.images.extend(run.images);
        }
        _ => events.push(Event::Stored(run)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_events::event::tests::{block_images, name, run};
    use pegainfer_core::kv::PrefixRoot;
    use std::collections::BTreeMap;
    use std::num::NonZeroU32;

    fn no_adapters(_: AdapterId) -> Option<String> {
        None
    }

    fn stored(parent: Option<u64>, names: &[u64], tokens: &[u32]) -> StoredRun {
        let Run { medium, parent, names, tokens, images, .. } = run(parent, names, tokens);
        StoredRun { medium, root: PrefixRoot::default(), parent, names, tokens, images }
    }

    fn removed(names: &[u64]) -> Vec<ContentName> {
        names.iter().copied().map(name).collect()
    }

    /// What a subscriber knows after `events`: the media, the parent, the tokens and the images of each block.
    type Known = BTreeMap<ContentName, ([bool; 3], Option<ContentName>, Vec<u32>, BlockImages)>;

    fn follow(known: &mut Known, events: &[Event]) {
        for event in events {
            match event {
                Event::Stored(run) => {
                    let mut parent = run.parent;
                    assert!(parent.is_none_or(|parent| known.contains_key(&parent)), "the parent is known");
                    assert_eq!(run.images.len(), run.names.len());
                    let texts = run.tokens.chunks(run.tokens.len() / run.names.len());
                    for ((name, tokens), images) in run.names.iter().zip(texts).zip(&run.images) {
                        let block = known.entry(*name).or_insert(([false; 3], parent, tokens.to_vec(), images.clone()));
                        block.0[place(run.medium)] = true;
                        parent = Some(*name);
                    }
                }
                Event::Removed { medium, names } => {
                    for name in names {
                        let block = known.get_mut(name).expect("only known blocks are removed");
                        block.0[place(*medium)] = false;
                        if block.0 == [false; 3] {
                            known.remove(name);
                        }
                    }
                }
                Event::Cleared => known.clear(),
            }
        }
    }

    fn known(events: &[Event]) -> Known {
        let mut known = Known::new();
        follow(&mut known, events);
        known
    }

    #[test]
    fn one_event_for_the_blocks_of_a_chain() {
        let mut mirror = Mirror::default();
        let changes = vec![
            KvChange::Stored(stored(None, &[1, 2], &[10, 11, 20, 21])),
            KvChange::Stored(stored(Some(2), &[3], &[30, 31])),
            KvChange::Stored(stored(Some(1), &[4], &[40, 41])),
            KvChange::Removed { medium: Medium::Device, names: removed(&[3]) },
            KvChange::Removed { medium: Medium::Device, names: removed(&[4, 99]) },
        ];
        let events = mirror.apply(changes, &no_adapters);
        assert_eq!(
            events,
            [
                Event::Stored(run(None, &[1, 2, 3], &[10, 11, 20, 21, 30, 31])),
                Event::Stored(run(Some(1), &[4], &[40, 41])),
                Event::Removed { medium: Medium::Device, names: removed(&[3, 4]) },
            ]
        );
        assert_eq!(mirror.dump(), [Event::Stored(run(None, &[1, 2], &[10, 11, 20, 21]))]);
    }

    #[test]
    fn tokens_of_images_have_their_id_and_blocks_their_images() {
        let mut mirror = Mirror::new(Some(9));
        let images = vec![block_images(&[([3; 32], 1)]), block_images(&[([4; 32], 0)])];
        let keys = StoredRun { images: images.clone(), ..stored(None, &[1, 2], &[7, IMAGE_KEY | 3, IMAGE_KEY, 8]) };
        let published = Event::Stored(Run { images, ..run(None, &[1, 2], &[7, 9, 9, 8]) });
        assert_eq!(mirror.apply(vec![KvChange::Stored(keys)], &no_adapters), std::slice::from_ref(&published));
        assert_eq!(mirror.dump(), [published]);
    }

    #[test]
    fn salted_blocks_and_nameless_adapters_are_not_published() {
        let mut mirror = Mirror::default();
        let of = |root: PrefixRoot, first: u64| KvChange::Stored(StoredRun { root, ..stored(None, &[first], &[1]) });
        let adapter = |n| PrefixRoot { salt: 0, adapter: NonZeroU32::new(n).map(AdapterId) };
        let names = |AdapterId(id): AdapterId| (id.get() == 1).then(|| "sql".to_owned());
        let changes = vec![of(PrefixRoot::from(5), 1), of(adapter(1), 2), of(adapter(2), 3)];
        let events = mirror.apply(changes, &names);
        assert_eq!(events, [Event::Stored(Run { adapter: Some("sql".into()), ..run(None, &[2], &[1]) })]);
        let gone = vec![KvChange::Removed { medium: Medium::Device, names: removed(&[1, 2, 3]) }];
        let events = mirror.apply(gone, &names);
        assert_eq!(events, [Event::Removed { medium: Medium::Device, names: removed(&[2]) }]);
    }

    #[test]
    fn a_block_is_gone_with_its_last_copy() {
        let mut mirror = Mirror::default();
        let again = || KvChange::Stored(stored(None, &[1], &[7]));
        let host = KvChange::Stored(StoredRun { medium: Medium::Host, ..stored(None, &[1], &[7]) });
        let gone = |medium| KvChange::Removed { medium, names: removed(&[1]) };
        mirror.apply(vec![again(), again(), host], &no_adapters);
        assert!(mirror.apply(vec![gone(Medium::Device)], &no_adapters).is_empty());
        let events = mirror.apply(vec![gone(Medium::Device)], &no_adapters);
        assert_eq!(events, [Event::Removed { medium: Medium::Device, names: removed(&[1]) }]);
        assert_eq!(mirror.dump(), [Event::Stored(Run { medium: Medium::Host, ..run(None, &[1], &[7]) })]);
        mirror.apply(vec![gone(Medium::Host)], &no_adapters);
        assert_eq!((mirror.len(), mirror.dump()), (0, Vec::new()));
    }

    #[test]
    fn a_dump_is_equal_to_the_events_before_it() {
        // A tree of chains in three media, which grows and shrinks. The numbers are a fixed sequence.
        let mut state = 1u64;
        let mut below = |n: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % n
        };
        let (mut mirror, mut known_now) = (Mirror::default(), Known::new());
        let mut next = 1;
        for step in 0..3000 {
            let all: Vec<ContentName> = known_now.keys().copied().collect();
            let medium = MEDIA[below(3) as usize];
            let change = if below(3) > 0 || all.is_empty() {
                let parent = (!all.is_empty() && below(4) > 0).then(|| all[below(all.len() as u64) as usize]);
                let names: Vec<u64> = (next..next + 1 + below(4)).collect();
                next += names.len() as u64;
                let tokens: Vec<u32> = names.iter().flat_map(|n| [*n as u32, 0]).collect();
                let image = |n: &u64| if n.is_multiple_of(3) { block_images(&[([*n as u8; 32], 1)]) } else { None };
                let images = names.iter().map(image).collect();
                KvChange::Stored(StoredRun { medium, parent, images, ..stored(None, &names, &tokens) })
            } else if below(50) == 0 {
                KvChange::Cleared
            } else {
                // A block without children, so that none is an orphan.
                let is_leaf = |name: &&ContentName| known_now.values().all(|block| block.1 != Some(**name));
                let leaf = *all.iter().find(is_leaf).unwrap();
                let medium = MEDIA[known_now[&leaf].0.iter().position(|is| *is).unwrap()];
                KvChange::Removed { medium, names: vec![leaf] }
            };
            follow(&mut known_now, &mirror.apply(vec![change], &no_adapters));
            if step % 100 == 0 {
                assert_eq!(known(&mirror.dump()), known_now);
            }
        }
        assert!(known_now.len() > 50, "{}", known_now.len());
    }

    #[test]
    fn orphans_are_left_out_of_a_dump() {
        let mut mirror = Mirror::default();
        let changes = vec![
            KvChange::Stored(stored(None, &[1, 2, 3], &[1, 2, 3])),
            KvChange::Removed { medium: Medium::Device, names: removed(&[2]) },
        ];
        mirror.apply(changes, &no_adapters);
        assert_eq!(mirror.dump(), [Event::Stored(run(None, &[1], &[1]))]);
    }
}
