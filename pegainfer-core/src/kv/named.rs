//! The names of a pool's blocks.

use super::block_images::{BlockImage, BlockImages};
use super::changes::{ChangeLog, Changes, KvChange, Medium, StoredRun};
use super::index::Node;
use super::names::{ContentName, Naming};
use super::prefix_root::PrefixRoot;
use std::collections::HashMap;

/// Blocks that follow a block, or a root, that is known by name.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parent {
    pub node: Node,
    /// Root of the sequence.
    pub root: PrefixRoot,
    /// Name of the block before; `None` at the start of a sequence.
    pub name: Option<ContentName>,
}

/// Full, computed blocks that follow each other in one sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct FullBlocks<'a> {
    pub ids: &'a [u32],
    /// Their tokens, `[ids, tokens of a block]`.
    pub tokens: &'a [u32],
    /// The images of each block; empty if none has an image.
    pub images: &'a [BlockImages],
}

impl FullBlocks<'_> {
    /// Tokens of each block.
    pub fn texts(&self) -> impl Iterator<Item = &[u32]> {
        self.tokens.chunks_exact((self.tokens.len() / self.ids.len().max(1)).max(1))
    }

    /// The images of block number `at`.
    pub fn images(&self, at: usize) -> &BlockImages {
        self.images.get(at).unwrap_or(&None)
    }
}

/// The names of the blocks in the index of a pool whose blocks have names.
#[derive(Debug)]
pub(super) struct Named {
    pub naming: Naming,
    /// Name of each block in the index.
    names: Vec<Option<ContentName>>,
    /// The block of each name.
    blocks: HashMap<ContentName, u32>,
    /// Root of each block with a name.
    roots: Vec<PrefixRoot>,
    /// Images of each block with a name.
    images: Vec<BlockImages>,
    pub log: Option<ChangeLog>,
}

impl Named {
    pub fn new(naming: Naming, blocks: usize) -> Self {
        let (names, roots) = (vec![None; blocks], vec![PrefixRoot::default(); blocks]);
        let images = vec![None; blocks];
        Self { naming, names, blocks: HashMap::with_capacity(2 * blocks), roots, images, log: None }
    }

    /// Name of a block that is in the index.
    pub fn of(&self, block: u32) -> Option<ContentName> {
        self.names[block as usize]
    }

    /// The block of a name.
    pub fn block(&self, name: ContentName) -> Option<u32> {
        self.blocks.get(&name).copied()
    }

    /// Root of a block that has a name.
    pub fn root_of(&self, block: u32) -> PrefixRoot {
        self.roots[block as usize]
    }

    /// Images of a block that has a name.
    pub fn images_of(&self, block: u32) -> BlockImages {
        self.images[block as usize].clone()
    }

    /// Names of `blocks` that follow `parent`, appended to `names`.
    pub fn extend(&self, parent: Parent, blocks: FullBlocks<'_>, names: &mut Vec<ContentName>) {
        let mut parent = parent;
        for (i, tokens) in blocks.texts().enumerate() {
            let name = self.next(parent, tokens, blocks.images(i).as_deref().unwrap_or_default());
            names.push(name);
            parent.name = Some(name);
        }
    }

    /// Name of the block of `tokens` with these images that follows `parent`.
    pub fn next(&self, parent: Parent, tokens: &[u32], images: &[BlockImage]) -> ContentName {
        self.naming.next(parent.name.unwrap_or_else(|| self.naming.root(parent.root)), tokens, images)
    }

    /// Names the blocks that entered the index; `entered` tells for each of `blocks`, which follow `parent` and have
    /// these `names`, whether it did. A block whose parent was evicted and computed again, or whose image was forgotten
    /// and has another number, enters a second time: the first one, which nobody can find, loses its name.
    pub fn enter(
        &mut self,
        parent: Parent,
        blocks: FullBlocks<'_>,
        names: &[ContentName],
        entered: impl Fn(usize) -> bool,
    ) {
        let mut run: Option<StoredRun> = None;
        for (i, ((&block, &name), tokens)) in blocks.ids.iter().zip(names).zip(blocks.texts()).enumerate() {
            let is_new = entered(i) && !self.move_name(name, block);
            if entered(i) {
                self.names[block as usize] = Some(name);
                self.roots[block as usize] = parent.root;
                self.images[block as usize].clone_from(blocks.images(i));
            }
            let Some(log) = self.log.as_mut() else { continue };
            if !is_new {
                run.take().into_iter().for_each(|run| log.push(KvChange::Stored(run)));
                continue;
            }
            let run = run.get_or_insert_with(|| StoredRun {
                medium: Medium::Device,
                root: parent.root,
                parent: if i == 0 { parent.name } else { Some(names[i - 1]) },
                names: Vec::new(),
                tokens: Vec::new(),
                images: Vec::new(),
            });
            run.names.push(name);
            run.tokens.extend_from_slice(tokens);
            run.images.push(blocks.images(i).clone());
        }
        if let (Some(log), Some(run)) = (self.log.as_mut(), run) {
            log.push(KvChange::Stored(run));
        }
    }

    /// Gives a name to a block, and takes it from the block that had it; returns true if one had it.
    fn move_name(&mut self, name: ContentName, block: u32) -> bool {
        let before = self.blocks.insert(name, block);
        if let Some(before) = before {
            self.names[before as usize] = None;
            self.images[before as usize] = None;
        }
        before.is_some()
    }

    /// Forgets the name of a block that leaves the index.
    pub fn leave(&mut self, block: u32) {
        let Some(name) = self.names[block as usize].take() else { return };
        self.blocks.remove(&name);
        self.images[block as usize] = None;
        if let Some(log) = &mut self.log {
            log.push(KvChange::Removed { medium: Medium::Device, names: vec![name] });
        }
    }

    /// Forgets all names.
    pub fn clear(&mut self) {
        self.names.fill(None);
        self.images.fill(None);
        self.blocks.clear();
        self.log.iter_mut().for_each(|log| log.push(KvChange::Cleared));
    }

    /// Empties the log.
    pub fn take_changes(&mut self) -> Changes {
        self.log.as_mut().map(ChangeLog::take).unwrap_or_default()
    }
}
