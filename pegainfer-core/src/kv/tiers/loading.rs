//! Blocks that come back to the device for a request.

use super::index::TierBlock;
use super::kept::KeptState;
use super::rates::Work;
use super::tiers::{InFlight, Load, LoadedState, Tiers};
use super::transfer::{BlockCopy, Direction, Transfer, TransferDone, TransferId};
use crate::kv::{BlockTable, ContentName, Medium, PrefixRoot};

/// What a request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadStart {
    /// Its blocks are loaded by a transfer of its own.
    Own(TransferId),
    /// Its blocks are read from the disk by a transfer of its own. Then they can be loaded.
    Reading(TransferId),
    /// Another request's transfer brings its next block.
    Other(TransferId),
}

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

/// Where the block that follows lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Host(u32),
    Disk(u32),
}

/// Blocks that follow what is on the device.
struct Chain {
    /// Blocks on the device, of a table that holds them.
    table: BlockTable,
    places: Vec<(ContentName, Place)>,
    /// The first block that no place has, if there is one more full block.
    missing: Option<ContentName>,
}

impl Chain {
    fn on_host((_, place): &(ContentName, Place)) -> Option<u32> {
        if let Place::Host(slot) = place { Some(*slot) } else { None }
    }
}

impl<K: KeptState> Tiers<K> {
    /// Starts to bring the blocks that follow the longest prefix of a request on the device, if there are copies and
    /// that is worth its time. `None`: there is nothing to wait for. For a model with state outside of KV blocks, also
    /// brings a state: `usable` returns up to where a table can be resumed without, and `allocate` a slot of the
    /// device.
    pub fn start_load(
        &mut self,
        wish: LoadWish<'_>,
        usable: impl Fn(&BlockTable) -> usize,
        allocate: impl Fn() -> Option<K>,
    ) -> Option<LoadStart> {
        let (LoadWish { tokens, spared, may_read, ahead, .. }, size) = (wish, self.pool.block_tokens());
        let mut chain = self.chain(wish);
        let usable = usable(&chain.table);
        if may_read {
            self.stats.queries += (tokens.len() - usable) as u64;
        }
        let next = chain.places.first().map(|(name, _)| *name).or(chain.missing);
        if let Some(id) = next.and_then(|next| self.bringing(next)) {
            return Some(LoadStart::Other(id));
        }
        chain.places.truncate(self.pool.available().saturating_sub(spared));
        let from_disk = chain.places.iter().filter(|place| Chain::on_host(place).is_none()).count();
        if from_disk > 0 {
            let work = Work { load: chain.places.len(), read: from_disk };
            if self.is_worth(work, ahead + work.load * size)
                && let Some(id) = self.read(&chain.places, wish, chain.table.blocks().len())
            {
                return Some(LoadStart::Reading(id));
            }
            let end = chain.places.iter().position(|place| Chain::on_host(place).is_none()).unwrap_or(0);
            chain.places.truncate(end);
        }
        let state = self.end_at_state(&mut chain, tokens, usable)?;
        let end = (chain.table.blocks().len() + chain.places.len()) * size;
        let as_blocks = self.states.as_ref().filter(|_| state.is_some()).map_or(0, |(_, as_blocks)| *as_blocks);
        if end <= usable || !self.is_worth(Work { load: chain.places.len() + as_blocks, read: 0 }, ahead + end - usable)
        {
            return None;
        }
        let state = match state {
            Some(slot) => Some((allocate()?, slot)),
            None => None,
        };
        self.load(chain, tokens, state, as_blocks).map(LoadStart::Own)
    }

    /// The blocks of a prompt that are on the device, and where those that follow are.
    fn chain(&self, LoadWish { root, tokens, may_read, .. }: LoadWish<'_>) -> Chain {
        let mut table = BlockTable::new(&self.pool, root);
        table.match_prefix(tokens);
        let mut parent = table.names().last().copied();
        let (mut places, mut missing) = (Vec::new(), None);
        let may_read = may_read && root.adapter.is_none();
        for tokens in tokens.chunks_exact(self.pool.block_tokens()).skip(table.blocks().len()) {
            let name = self.naming.next(parent.unwrap_or_else(|| self.naming.root(root)), tokens);
            let block = TierBlock { name, parent, tokens, root: Some(root) };
            let on_disk = || self.disk.as_ref().filter(|_| may_read && !self.host.knows(name))?.find(block);
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

    /// For a model with state outside of KV blocks: ends the chain at its last block with a state on the host, and
    /// returns the slot of that; `None` without one beyond the `usable` tokens. For other models: `Some(None)`.
    #[expect(clippy::option_option, reason = "no state is needed, or none is there")]
    fn end_at_state(&self, chain: &mut Chain, tokens: &[u32], usable: usize) -> Option<Option<u32>> {
        let Some((states, _)) = &self.states else { return Some(None) };
        let size = self.pool.block_tokens();
        let names: Vec<ContentName> =
            chain.table.names().iter().copied().chain(chain.places.iter().map(|(name, _)| *name)).collect();
        let state_after = |at: usize| {
            let block = TierBlock { name: names[at], parent: None, tokens: &tokens[at * size..][..size], root: None };
            Some((at + 1, states.find(block)?))
        };
        // All but the last token at most, which is computed for its logits.
        let last = names.len().min(tokens.len().saturating_sub(1) / size);
        let (blocks, slot) = (usable / size..last).rev().find_map(state_after)?;
        let before = chain.table.blocks().len();
        chain.places.truncate(blocks.saturating_sub(before));
        chain.table.truncate(blocks.min(before) * size);
        Some(Some(slot))
    }

    /// True if this work, behind what is queued, is faster than computing `tokens` tokens.
    fn is_worth(&mut self, work: Work, tokens: usize) -> bool {
        let is_faster = self.rates.is_faster(work.plus(self.queued()), tokens);
        if !is_faster {
            self.rates.refused();
            self.stats.loads_refused += 1;
        }
        is_faster
    }

    /// Starts to copy the blocks of a chain that are all on the host, and the state after them, which is as large as
    /// `as_blocks` blocks, to its slot of the device.
    fn load(
        &mut self,
        Chain { mut table, places, missing }: Chain,
        tokens: &[u32],
        state: Option<(K, u32)>,
        as_blocks: usize,
    ) -> Option<TransferId> {
        let before = table.blocks().len();
        let end = (before + places.len()) * self.pool.block_tokens();
        table.grow(end).ok()?;
        let first = places.first().map(|(name, _)| *name).or(missing);
        let slots: Vec<u32> = places.iter().filter_map(Chain::on_host).collect();
        slots.iter().for_each(|slot| self.host.pin(*slot));
        let blocks = slots.iter().enumerate();
        let blocks = blocks.map(|(i, slot)| BlockCopy { block: table.blocks().at(before + i), slot: *slot }).collect();
        let states: Vec<BlockCopy> =
            state.iter().map(|(state, slot)| BlockCopy { block: state.slot(), slot: *slot }).collect();
        if let Some((index, _)) = &mut self.states {
            states.iter().for_each(|copy| index.pin(copy.slot));
        }
        let (tokens, work) = (tokens[..end].to_vec(), slots.len() + as_blocks);
        let load = Load { table, tokens, before, first, slots, state, work, forgotten: false };
        let transfer = Transfer { states, ..Transfer::new(Direction::Load, blocks) };
        Some(self.start(transfer, InFlight::Load(load)))
    }

    /// Starts to read the blocks of a chain that are on the disk into slots of the host, as far as there are slots.
    /// `before`: number of blocks before the chain.
    fn read(
        &mut self,
        chain: &[(ContentName, Place)],
        LoadWish { root, tokens, .. }: LoadWish<'_>,
        before: usize,
    ) -> Option<TransferId> {
        let size = self.pool.block_tokens();
        // What the chain has on the host must not make place for the rest.
        let on_host: Vec<u32> = chain.iter().filter_map(Chain::on_host).collect();
        on_host.iter().for_each(|slot| self.host.pin(*slot));
        let (mut copies, mut gone, mut first) = (Vec::new(), Vec::new(), None);
        for (i, (name, place)) in chain.iter().enumerate() {
            let (Place::Disk(block), Some(disk)) = (*place, &mut self.disk) else { continue };
            let parent = disk.header(block).and_then(|header| header.parent);
            let tokens = &tokens[(before + i) * size..][..size];
            let inserted = self.host.insert(TierBlock { name: *name, parent, tokens, root: Some(root) });
            let Some((slot, evicted)) = inserted else { break };
            gone.extend(evicted);
            disk.pin(block);
            disk.touch(block);
            first.get_or_insert(*name);
            copies.push(BlockCopy { block, slot });
        }
        on_host.iter().for_each(|slot| self.host.unpin(*slot));
        self.tell_removed(Medium::Host, gone);
        let in_flight = InFlight::Read { copies: copies.clone(), first: first? };
        Some(self.start(Transfer::new(Direction::Read, copies), in_flight))
    }

    pub(super) fn finish_load(&mut self, mut load: Load<K>, done: &TransferDone) -> Option<LoadedState<K>> {
        let (mut good, mut state_is_good) = (0, false);
        if let Ok(checksums) = &done.result {
            let is_same = |(slot, sum): &(&u32, &u64)| self.host.checksum(**slot) == Some(**sum);
            let pairs = || load.slots.iter().zip(checksums);
            good = pairs().take_while(is_same).count();
            let wrong: Vec<u32> = pairs().filter(|pair| !is_same(pair)).map(|(slot, _)| *slot).collect();
            self.forget_corrupt(&wrong);
            if let Some((_, slot)) = &load.state {
                state_is_good = self.compare_state(*slot, checksums.last().copied());
            }
            self.rates.loaded(load.work, done.took);
            self.stats.loaded_blocks += load.slots.len() as u64;
            self.stats.loads += 1;
            self.stats.load_nanos += done.took.as_nanos() as u64;
        }
        load.slots.iter().for_each(|slot| self.host.unpin(*slot));
        if let (Some((_, slot)), Some((states, _))) = (&load.state, &mut self.states) {
            states.unpin(*slot);
        }
        let size = self.pool.block_tokens();
        if !load.forgotten && good > 0 {
            load.table.register(&load.tokens[..(load.before + good) * size]);
            self.stats.hits += (good * size) as u64;
        }
        let (state, _) = load.state?;
        let is_whole = state_is_good && good == load.slots.len() && !load.forgotten;
        self.stats.loaded_states += u64::from(is_whole);
        is_whole.then_some(LoadedState { table: load.table, tokens: load.tokens.len(), state })
    }

    /// True if the state in this slot has this checksum. Otherwise it is forgotten.
    fn compare_state(&mut self, slot: u32, checksum: Option<u64>) -> bool {
        let Some((states, _)) = &mut self.states else { return false };
        let is_same = checksum.is_some() && states.checksum(slot) == checksum;
        if !is_same {
            self.stats.corrupt_blocks += 1;
            log::warn!("the copy of a state has changed; its tokens are computed again");
            states.forget(slot);
        }
        is_same
    }

    /// Forgets blocks whose bytes have changed, on the host and on the disk, where they may come from.
    fn forget_corrupt(&mut self, slots: &[u32]) {
        if slots.is_empty() {
            return;
        }
        self.stats.corrupt_blocks += slots.len() as u64;
        log::warn!("{} copies of KV blocks have changed; these blocks are computed again", slots.len());
        let names = slots.iter().filter_map(|slot| self.host.name(*slot)).collect();
        self.tell_removed(Medium::Host, names);
        let mut on_disk = Vec::new();
        for slot in slots {
            let name = self.host.name(*slot);
            self.host.forget(*slot);
            if let (Some(disk), Some(name)) = (&self.disk, name)
                && let Some(block) = disk.slot_of(name)
            {
                on_disk.push(block);
                self.tell_removed(Medium::Disk, vec![name]);
            }
        }
        self.erase(on_disk);
    }

    /// The transfer that brings the block of this name as its first one.
    fn bringing(&self, name: ContentName) -> Option<TransferId> {
        let brings = |kind: &InFlight<K>| match kind {
            InFlight::Load(Load { first, .. }) => *first == Some(name),
            InFlight::Read { first, .. } => *first == name,
            InFlight::Store { .. } | InFlight::StoreStates { .. } | InFlight::Write { .. } | InFlight::Erase { .. } => {
                false
            }
        };
        self.in_flight.iter().find(|(_, kind)| brings(kind)).map(|(id, _)| *id)
    }
}
