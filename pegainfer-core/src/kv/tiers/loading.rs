//! Blocks that come back to the device for a request.

use super::chain::{Chain, LoadWish, Place};
use super::in_flight::{InFlight, Load, Loaded, Read};
use super::index::TierBlock;
use super::kept::KeptState;
use super::rates::Work;
use super::tiers::Tiers;
use super::transfer::{BlockCopy, Direction, Transfer, TransferDone, TransferId};
use crate::kv::{BlockTable, ContentName, Medium};

/// What a request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadStart {
    /// Its blocks are loaded by a transfer of its own.
    Own(TransferId),
    /// Some of its blocks are read from the disk for it, or loaded while others are read. Then the next can be loaded.
    Reading(TransferId),
    /// Another request's transfer brings its next block.
    Other(TransferId),
}

/// Bytes of blocks that are read by one transfer: the first ones are loaded while others are read.
const READ_BYTES: usize = 64 << 20;

/// What is to be read from the disk.
struct ToRead<'a> {
    /// The chain, of which only some blocks are on the disk.
    places: &'a [(ContentName, Place)],
    /// Number of blocks before it.
    before: usize,
    /// Slot of the disk with the state after it, if that is to be read, too.
    state: Option<u32>,
    /// Name of the block that other requests for this prompt need next.
    next: Option<ContentName>,
    /// Number of blocks that a state is as large as.
    as_blocks: usize,
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
        let next = chain.next();
        if let Some(id) = next.and_then(|next| self.bringing(next)) {
            return Some(if may_read { LoadStart::Other(id) } else { LoadStart::Reading(id) });
        }
        chain.places.truncate(self.pool.available().saturating_sub(spared));
        if let Some(id) = self.start_read(&chain, wish, usable, next) {
            return Some(LoadStart::Reading(id));
        }
        chain.end_at_disk();
        let state = self.end_at_state(&mut chain, wish, usable)?;
        let end = (chain.table.blocks().len() + chain.places.len()) * size;
        let as_blocks = if state.is_some() { self.state_as_blocks() } else { 0 };
        if end <= usable || !self.is_worth(Work { load: chain.places.len() + as_blocks, read: 0 }, ahead + end - usable)
        {
            return None;
        }
        let state = match state {
            Some(slot) => Some((allocate()?, slot)),
            None => None,
        };
        let continues = chain.missing.is_some_and(|name| self.bringing(name).is_some());
        let id = self.load(chain, tokens, state, as_blocks)?;
        Some(if continues { LoadStart::Reading(id) } else { LoadStart::Own(id) })
    }

    /// For a model with state outside of KV blocks: ends the chain, which is on the host, at its last block with a
    /// state on the host, and returns the slot of that; `None` without one beyond the `usable` tokens. For other
    /// models: `Some(None)`.
    #[expect(clippy::option_option, reason = "no state is needed, or none is there")]
    fn end_at_state(&self, chain: &mut Chain, wish: LoadWish<'_>, usable: usize) -> Option<Option<u32>> {
        if self.states.is_none() {
            return Some(None);
        }
        let (blocks, place) = self.last_state(chain, LoadWish { may_read: false, ..wish }, usable)?;
        chain.truncate(blocks);
        Some(Some(place.on_host()?))
    }

    /// Number of blocks that a state is as large as; 0 for a model without.
    fn state_as_blocks(&self) -> usize {
        self.states.as_ref().map_or(0, |states| states.as_blocks)
    }

    /// Starts to read what is missing on the host of the longest prefix that can be loaded, if that is worth its time;
    /// `None` also if nothing is missing. `next`: name of the block after those on the device.
    fn start_read(
        &mut self,
        chain: &Chain,
        wish: LoadWish<'_>,
        usable: usize,
        next: Option<ContentName>,
    ) -> Option<TransferId> {
        let (before, as_blocks) = (chain.table.blocks().len(), self.state_as_blocks());
        let (end, state) = match self.states {
            Some(_) => self.last_state(chain, wish, usable).map(|(end, place)| (end, place.on_disk()))?,
            None => (before + chain.places.len(), None),
        };
        let places = &chain.places[..end.saturating_sub(before)];
        let from_disk = places.iter().filter(|(_, place)| place.on_disk().is_some()).count();
        if from_disk == 0 && state.is_none() {
            return None;
        }
        let read = from_disk + if state.is_some() { as_blocks } else { 0 };
        let tokens = wish.ahead + end * self.pool.block_tokens() - usable;
        if !self.is_worth(Work { load: places.len() + as_blocks, read }, tokens) {
            return None;
        }
        self.read(ToRead { places, before, state, next, as_blocks }, wish)
    }

    /// True if this work, behind what is queued, is faster than computing `tokens` tokens.
    fn is_worth(&mut self, work: Work, tokens: usize) -> bool {
        let queued = self.queued();
        // What is on the host does not wait for the disk.
        let queued = if work.read == 0 { Work { read: 0, ..queued } } else { queued };
        let is_faster = self.rates.is_faster(work.plus(queued), tokens);
        if !is_faster {
            self.rates.refused();
            self.stats.loads_refused += 1;
        }
        is_faster
    }

    /// Starts to copy the blocks of a chain that are all on the host, and the state after them, which is as large as
    /// `as_blocks` blocks, to its slot of the device.
    fn load(&mut self, chain: Chain, tokens: &[u32], state: Option<(K, u32)>, as_blocks: usize) -> Option<TransferId> {
        let first = chain.next();
        let Chain { mut table, places, .. } = chain;
        let before = table.blocks().len();
        let end = (before + places.len()) * self.pool.block_tokens();
        table.grow(end).ok()?;
        let slots: Vec<u32> = places.iter().filter_map(|(_, place)| place.on_host()).collect();
        slots.iter().for_each(|slot| self.host.pin(*slot));
        let blocks = slots.iter().enumerate();
        let blocks = blocks.map(|(i, slot)| BlockCopy { block: table.blocks().at(before + i), slot: *slot }).collect();
        let states: Vec<BlockCopy> =
            state.iter().map(|(state, slot)| BlockCopy { block: state.slot(), slot: *slot }).collect();
        if let Some(index) = &mut self.states {
            states.iter().for_each(|copy| index.host.pin(copy.slot));
        }
        let (tokens, work) = (tokens[..end].to_vec(), slots.len() + as_blocks);
        let load = Load { table, tokens, before, first, slots, state, work, forgotten: false };
        let transfer = Transfer { states, ..Transfer::new(Direction::Load, blocks) };
        Some(self.start(transfer, InFlight::Load(load)))
    }

    /// Starts to read into slots of the host, as far as there are slots. Returns the first transfer.
    fn read(&mut self, to_read: ToRead<'_>, LoadWish { root, tokens, .. }: LoadWish<'_>) -> Option<TransferId> {
        let (ToRead { places, before, state, next, as_blocks }, size) = (to_read, self.pool.block_tokens());
        let states = match state {
            Some(slot) => vec![self.read_state(slot, root)?],
            None => Vec::new(),
        };
        // What the chain has on the host must not make place for the rest.
        let on_host: Vec<u32> = places.iter().filter_map(|(_, place)| place.on_host()).collect();
        on_host.iter().for_each(|slot| self.host.pin(*slot));
        let (mut blocks, mut gone, mut names) = (Vec::new(), Vec::new(), Vec::new());
        for (i, (name, place)) in places.iter().enumerate() {
            let (Some(block), Some(disk)) = (place.on_disk(), &mut self.disk) else { continue };
            let parent = disk.header(block).and_then(|header| header.parent);
            let tokens = &tokens[(before + i) * size..][..size];
            let inserted = self.host.insert(TierBlock { name: *name, parent, tokens, root: Some(root) });
            let Some((slot, evicted)) = inserted else { break };
            gone.extend(evicted);
            disk.pin(block);
            disk.touch(block);
            names.push(*name);
            blocks.push(BlockCopy { block, slot });
        }
        on_host.iter().for_each(|slot| self.host.unpin(*slot));
        self.tell_removed(Medium::Host, gone);
        if blocks.is_empty() && states.is_empty() {
            return None;
        }
        if self.states.is_some() {
            // Without the state at the end, the first blocks are of no use to anyone.
            return Some(self.start_reading(blocks, states, next, as_blocks));
        }
        let at_once = (READ_BYTES / self.stats.slot_bytes.max(1)).max(1);
        let parts = blocks.chunks(at_once).zip(names.chunks(at_once));
        let ids: Vec<TransferId> =
            parts.map(|(blocks, names)| self.start_reading(blocks.to_vec(), Vec::new(), Some(names[0]), 0)).collect();
        ids.first().copied()
    }

    fn start_reading(
        &mut self,
        blocks: Vec<BlockCopy>,
        states: Vec<BlockCopy>,
        first: Option<ContentName>,
        as_blocks: usize,
    ) -> TransferId {
        let work = blocks.len() + states.len() * as_blocks;
        let transfer = Transfer { states: states.clone(), ..Transfer::new(Direction::Read, blocks.clone()) };
        self.start(transfer, InFlight::Read(Read { blocks, states, first, work }))
    }

    pub(super) fn finish_load(&mut self, mut load: Load<K>, done: &TransferDone) -> Option<Loaded<K>> {
        let mut good = 0;
        if let Ok(checksums) = &done.result {
            let is_same = |(slot, sum): &(&u32, &u64)| self.host.checksum(**slot) == Some(**sum);
            let pairs = || load.slots.iter().zip(checksums);
            good = pairs().take_while(is_same).count();
            let wrong: Vec<u32> = pairs().filter(|pair| !is_same(pair)).map(|(slot, _)| *slot).collect();
            self.forget_corrupt(&wrong);
            self.rates.loaded(load.work, done.took);
            self.stats.loaded_blocks += load.slots.len() as u64;
            self.stats.loads += 1;
            self.stats.load_nanos += done.took.as_nanos() as u64;
        }
        load.slots.iter().for_each(|slot| self.host.unpin(*slot));
        let state_is_good = self.finish_loaded_state(&load, done);
        let size = self.pool.block_tokens();
        if load.forgotten {
            return None;
        }
        if good > 0 {
            load.table.register(&load.tokens[..(load.before + good) * size]);
            self.stats.hits += (good * size) as u64;
        }
        load.table.truncate((load.before + good) * size);
        let is_whole = state_is_good && good == load.slots.len();
        let state = load.state.filter(|_| is_whole).map(|(state, _)| state);
        self.stats.loaded_states += u64::from(state.is_some());
        Some(Loaded { table: load.table, state })
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
        self.in_flight.iter().find(|(_, kind)| kind.brings(name)).map(|(id, _)| *id)
    }
}
