//! Where the blocks and the state lie with which a prompt continues.

use super::index::TierBlock;
use super::kept::KeptState;
use super::tiers::Tiers;
use crate::kv::{BlockTable, ContentName, PrefixRoot};

/// A request whose prompt may continue outside the device.
#[derive(Debug, Clone, Copy)]
pub struct LoadWish<'a> {
    /// Root of its sequence.
    pub root: PrefixRoot,
    /// Its tokens.
    pub tokens: &'a [u32],
    /// Number of blocks of the pool that are left to others.
    pub spared: usize,
    /// Number of tokens of others that would be computed before its own.
    pub ahead: usize,
    /// True if blocks may also come from the disk; false if that was tried.
    pub may_read: bool,
}

/// Where a block or a state lies, and in which slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Host(u32),
    Disk(u32),
}

/// Blocks that follow what is on the device.
pub(super) struct Chain {
    /// Blocks on the device, of a table that holds them.
    pub table: BlockTable,
    pub places: Vec<(ContentName, Place)>,
    /// The first block that no place has, if there is one more full block.
    pub missing: Option<ContentName>,
}

impl LoadWish<'_> {
    /// True if copies on the disk count; it has none of an adapter.
    fn may_read(&self) -> bool {
        self.may_read && self.root.adapter.is_none()
    }
}

impl Place {
    pub fn on_host(self) -> Option<u32> {
        if let Self::Host(slot) = self { Some(slot) } else { None }
    }

    pub fn on_disk(self) -> Option<u32> {
        if let Self::Disk(slot) = self { Some(slot) } else { None }
    }
}

impl Chain {
    /// Name of the first block after those on the device, if there is one.
    pub fn next(&self) -> Option<ContentName> {
        self.places.first().map(|(name, _)| *name).or(self.missing)
    }

    /// Ends the chain before the first block that is only on the disk.
    pub fn end_at_disk(&mut self) {
        let end = self.places.iter().position(|(_, place)| place.on_disk().is_some());
        self.places.truncate(end.unwrap_or(self.places.len()));
    }

    /// Ends the chain after its first `blocks` blocks, those on the device included.
    pub fn truncate(&mut self, blocks: usize) {
        let before = self.table.blocks().len();
        self.places.truncate(blocks.saturating_sub(before));
        self.table.truncate(blocks.min(before) * self.table.block_tokens());
    }
}

impl<K: KeptState> Tiers<K> {
    /// The blocks of a prompt that are on the device, and where those that follow are.
    pub(super) fn chain(&self, wish: LoadWish<'_>) -> Chain {
        let LoadWish { root, tokens, .. } = wish;
        let mut table = BlockTable::new(&self.pool, root);
        table.match_prefix(tokens);
        let mut parent = table.names().last().copied();
        let (mut places, mut missing) = (Vec::new(), None);
        for tokens in tokens.chunks_exact(self.pool.block_tokens()).skip(table.blocks().len()) {
            let name = self.naming.next(parent.unwrap_or_else(|| self.naming.root(root)), tokens, &[]);
            let block = TierBlock { name, parent, tokens, root: Some(root) };
            let on_disk = || self.disk.as_ref().filter(|_| wish.may_read() && !self.host.knows(name))?.find(block);
            let place = self.host.find(block).map(Place::Host).or_else(|| on_disk().map(Place::Disk));
            let Some(place) = place else {
                missing = Some(name);
                break;
            };
            places.push((name, place));
            parent = Some(name);
        }
        Chain { table, places, missing }
    }

    /// For a model with state outside of KV blocks: the last block of a chain after which there is a state, as a number
    /// of blocks, and where that state is. `None` without one beyond the first `usable` tokens.
    pub(super) fn last_state(&self, chain: &Chain, wish: LoadWish<'_>, usable: usize) -> Option<(usize, Place)> {
        let (states, size) = (self.states.as_ref()?, self.pool.block_tokens());
        // A chain is on the host as a whole before it is loaded.
        let places = chain.places.iter().take(self.host.total()).map(|(name, _)| *name);
        let names: Vec<ContentName> = chain.table.names().iter().copied().chain(places).collect();
        let state_after = |at: usize| {
            let tokens = &wish.tokens[at * size..][..size];
            let block = TierBlock { name: names[at], parent: None, tokens, root: None };
            let on_disk = || states.disk.as_ref().filter(|_| wish.may_read() && !states.host.knows(block.name));
            let on_disk = || on_disk()?.find(block).map(Place::Disk);
            Some((at + 1, states.host.find(block).map(Place::Host).or_else(on_disk)?))
        };
        // All but the last token at most, which is computed for its logits.
        let last = names.len().min(wish.tokens.len().saturating_sub(1) / size);
        (usable / size..last).rev().find_map(state_after)
    }
}
