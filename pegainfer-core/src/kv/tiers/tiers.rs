//! The tiers of one engine: what is where, and transfers that are not done.

use super::in_flight::{InFlight, Loaded, Pins};
use super::index::{SlotIndex, TierBlock};
use super::kept::KeptState;
use super::rates::{Rates, Work};
use super::state_tier::StateTier;
use super::stats::TierStats;
use super::transfer::{BlockCopy, Direction, Transfer, TransferDone, TransferId};
use crate::kv::disk::SlotHeader;
use crate::kv::pool::HeldBlocks;
use crate::kv::{BlockPool, BlockTable, ContentName, Medium, Naming, PrefixRoot};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Stores hold at most one in this many blocks of the pool, which cannot be evicted meanwhile.
const POOL_PER_STORE: usize = 8;

/// The copies of an engine's blocks in host memory and on a disk.
#[derive(Debug)]
pub struct Tiers<K = ()> {
    pub(super) pool: BlockPool,
    pub(super) naming: Naming,
    pub(super) host: SlotIndex,
    pub(super) disk: Option<SlotIndex>,
    /// Slots for states outside of KV blocks, for a model that has such.
    pub(super) states: Option<StateTier>,
    /// Blocks that are to be stored.
    unstored: VecDeque<Unstored>,
    /// Slots of the host whose blocks are to be written to the disk, their names, and whether they were used again.
    pub(super) unwritten: VecDeque<(u32, ContentName, bool)>,
    pub(super) rates: Rates,
    next: u64,
    /// Transfers that the executor has not taken yet.
    started: Vec<Transfer>,
    pub(super) in_flight: BTreeMap<TransferId, InFlight<K>>,
    pub(super) stats: TierStats,
}

/// A block of the pool that is to be stored.
#[derive(Debug)]
struct Unstored {
    name: ContentName,
    parent: Option<ContentName>,
    root: PrefixRoot,
    tokens: Box<[u32]>,
}

impl<K: KeptState> Tiers<K> {
    /// `slots` empty slots of `slot_bytes` bytes of host memory for the blocks of `pool`, which are named by `naming`
    /// unless they have names. The pool is unused.
    pub fn new(pool: BlockPool, naming: Naming, slots: usize, slot_bytes: usize) -> Self {
        let naming = pool.name_blocks(naming);
        let host = SlotIndex::new(slots, pool.block_tokens());
        let stats = TierStats { host_slots: slots, slot_bytes, ..TierStats::default() };
        let (rates, started, in_flight) = (Rates::default(), Vec::new(), BTreeMap::new());
        let (unstored, unwritten) = (VecDeque::new(), VecDeque::new());
        Self {
            pool,
            naming,
            host,
            disk: None,
            states: None,
            unstored,
            unwritten,
            rates,
            next: 0,
            started,
            in_flight,
            stats,
        }
    }

    /// Also uses a disk with `slots` slots, some of which hold blocks with names of the same [`Naming`].
    pub fn use_disk(&mut self, slots: usize, found: impl IntoIterator<Item = (u32, SlotHeader)>) {
        self.disk = Some(SlotIndex::restored(slots, self.pool.block_tokens(), found));
        self.stats.disk_slots = slots;
    }

    /// Stores the full blocks of a sequence that no slot has, from number `offered` on, which becomes the number of
    /// all: now, or when earlier ones are stored, if they are still in the pool then. `tokens`: those of the sequence,
    /// or the first of them, if no later block is to be stored.
    pub fn offer(&mut self, table: &BlockTable, tokens: &[u32], offered: &mut usize) {
        let (size, mut again) = (self.pool.block_tokens(), Vec::new());
        let names = &table.names()[..table.names().len().min(tokens.len() / size)];
        if *offered >= names.len() {
            return;
        }
        for (i, &name) in names.iter().enumerate().skip(*offered) {
            if let Some(slot) = self.host.slot_of(name) {
                self.host.touch(slot);
                again.push(slot);
            } else if self.unstored.len() < self.pool.total() {
                let parent = i.checked_sub(1).map(|before| names[before]);
                let tokens = tokens[i * size..][..size].into();
                self.unstored.push_back(Unstored { name, parent, root: table.root(), tokens });
            } else {
                self.stats.stores_skipped += 1;
            }
        }
        *offered = names.len();
        self.store_more();
        // A block that is used again is worth a place on the disk.
        self.write(&again, true);
    }

    fn store_more(&mut self) {
        let most = self.pool.total().div_ceil(POOL_PER_STORE).saturating_sub(self.storing());
        let (mut copies, mut slots, mut gone) = (Vec::new(), Vec::new(), Vec::new());
        let mut held = HeldBlocks::none(&self.pool);
        while copies.len() < most
            && let Some(Unstored { name, parent, root, tokens }) = self.unstored.pop_front()
        {
            if self.host.knows(name) {
                continue;
            }
            let block = TierBlock { name, parent, tokens: &tokens, root: Some(root) };
            let Some(id) = self.pool.hold_named(name, &mut held) else {
                self.stats.stores_skipped += 1;
                continue;
            };
            let Some((slot, evicted)) = self.host.insert(block) else {
                self.stats.stores_skipped += 1;
                continue;
            };
            gone.extend(evicted);
            copies.push(BlockCopy { block: id, slot });
            slots.push(slot);
        }
        self.tell_removed(Medium::Host, gone);
        if !copies.is_empty() {
            self.start(Transfer::new(Direction::Store, copies), InFlight::Store { held, slots });
        }
    }

    pub(super) fn start(&mut self, transfer: Transfer, kind: InFlight<K>) -> TransferId {
        let id = TransferId(self.next);
        self.next += 1;
        self.started.push(Transfer { id, ..transfer });
        self.in_flight.insert(id, kind);
        id
    }

    /// Transfers to be carried out, in order.
    pub fn take_started(&mut self) -> Vec<Transfer> {
        std::mem::take(&mut self.started)
    }

    /// Takes the end of a transfer. Blocks that were stored can be loaded, and blocks that were loaded can be found in
    /// the pool, up to the first whose checksum is wrong. Returns what was loaded.
    pub fn finish(&mut self, done: TransferDone) -> Option<Loaded<K>> {
        let kind = self.in_flight.remove(&done.id)?;
        if let Err(why) = &done.result {
            self.stats.failed_transfers += 1;
            log::warn!("a copy of KV blocks failed: {why}");
        }
        match kind {
            InFlight::Store { slots, held } => {
                drop(held);
                self.finish_store(&slots, &done);
                self.store_more();
            }
            InFlight::StoreStates { slots, held } => {
                self.finish_states(&slots, &done);
                drop(held);
            }
            InFlight::Load(load) => return self.finish_load(load, &done),
            InFlight::Write { copies } => self.finish_write(&copies, &done),
            InFlight::WriteStates { copies } => self.finish_state_write(&copies, &done),
            InFlight::Read(read) => self.finish_read(&read, &done),
            InFlight::Erase { slots } => self.finish_erase(&slots),
            InFlight::EraseStates { slots } => self.finish_state_erase(&slots),
        }
        None
    }

    fn finish_store(&mut self, slots: &[u32], done: &TransferDone) {
        match &done.result {
            Ok(checksums) => {
                slots.iter().zip(checksums).for_each(|(slot, checksum)| self.host.fill(*slot, *checksum));
                self.tell_stored(Medium::Host, slots);
                self.stats.stored_blocks += slots.len() as u64;
                self.stats.stores += 1;
                self.stats.store_nanos += done.took.as_nanos() as u64;
                self.write(slots, false);
            }
            Err(_) => slots.iter().for_each(|slot| self.host.abandon(*slot)),
        }
    }

    /// A step computed `tokens` tokens.
    pub fn computed(&mut self, tokens: usize, took: Duration) {
        self.rates.computed(tokens, took);
    }

    /// Expected time until the transfer `id`, for which a request waits, is done; `None` if such were never measured.
    pub fn expected_time(&self, id: TransferId) -> Option<Duration> {
        let own = self.in_flight.get(&id)?.work();
        let Work { load, read } = self.queued();
        self.rates.time(if own.read > 0 { Work { load: 0, read } } else { Work { load, read: 0 } })
    }

    /// Number of tokens of a prompt that are on the device once a transfer has loaded the last of them; 0 for one that
    /// loads nothing.
    pub fn loads(&self, id: TransferId) -> usize {
        match self.in_flight.get(&id) {
            Some(InFlight::Load(load)) => load.tokens.len(),
            _ => 0,
        }
    }

    /// True while a transfer is not done.
    pub fn is_busy(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Forgets all copies, also on the disk; transfers in flight change nothing any more.
    pub fn clear(&mut self) {
        self.host.clear();
        let on_disk = self.disk.as_ref().map(SlotIndex::known).unwrap_or_default();
        self.erase(on_disk);
        let states_on_disk = self.states.as_mut().map(StateTier::clear).unwrap_or_default();
        self.erase_states(states_on_disk);
        self.unstored.clear();
        self.unwritten.clear();
        for kind in self.in_flight.values_mut() {
            if let InFlight::Load(load) = kind {
                load.forgotten = true;
            }
        }
    }

    /// Gauges and counters now.
    pub fn stats(&self) -> TierStats {
        let used = |index: Option<&SlotIndex>| index.map_or(0, SlotIndex::used);
        TierStats {
            host_used: self.host.used(),
            disk_used: used(self.disk.as_ref()),
            state_used: used(self.states.as_ref().map(|states| &states.host)),
            state_disk_used: used(self.states.as_ref().and_then(|states| states.disk.as_ref())),
            ..self.stats
        }
    }

    /// Blocks of the pool that transfers hold, in any order, some of them twice; for tests.
    pub fn held_blocks(&self) -> Vec<u32> {
        self.in_flight.values().flat_map(InFlight::held_blocks).collect()
    }

    /// Checks the bookkeeping; for tests.
    pub fn check(&self) -> Result<(), String> {
        let pinned = |of: fn(Pins) -> usize| self.in_flight.values().map(|kind| of(kind.pins())).sum();
        self.host.check(pinned(|pins| pins.host))?;
        self.disk.as_ref().map_or(Ok(()), |disk| disk.check(pinned(|pins| pins.disk)))?;
        let Some(states) = &self.states else { return Ok(()) };
        states.host.check(pinned(|pins| pins.host_states))?;
        states.disk.as_ref().map_or(Ok(()), |disk| disk.check(pinned(|pins| pins.disk_states)))
    }

    /// Blocks that are being loaded and read.
    pub(super) fn queued(&self) -> Work {
        self.in_flight.values().map(InFlight::work).fold(Work::default(), Work::plus)
    }

    /// Number of blocks that are being stored.
    fn storing(&self) -> usize {
        let blocks = |kind: &InFlight<K>| if let InFlight::Store { slots, .. } = kind { slots.len() } else { 0 };
        self.in_flight.values().map(blocks).sum()
    }
}
