//! Host memory and disk of a world: slow, failing, and with bits that change.

use crate::requests::{Rng, mix};
use pegainfer_core::adapter::AdapterId;
use pegainfer_core::kv::disk::SlotHeader;
use pegainfer_core::kv::tiers::{BlockCopy, Direction, Transfer, TransferDone, TransferId};
use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// A token's KV and the adapter that wrote it.
type Value = (u64, Option<AdapterId>);

/// KV of the device.
pub struct DeviceKv<'a> {
    pub values: &'a mut [u64],
    pub adapters: &'a mut [Option<AdapterId>],
    pub block_tokens: usize,
    /// States outside of KV blocks.
    pub states: &'a mut [u64],
}

impl DeviceKv<'_> {
    fn range(&self, block: u32) -> std::ops::Range<usize> {
        block as usize * self.block_tokens..(block as usize + 1) * self.block_tokens
    }
}

/// Slots of the host and of the disk, and transfers in any order.
pub struct Media {
    host: Vec<Vec<Value>>,
    /// Slots of the host for states.
    states: Vec<u64>,
    /// Without a header while a slot is written, and after it was erased.
    disk: Vec<(Option<SlotHeader>, Vec<Value>)>,
    pub in_flight: Vec<Transfer>,
    /// Number of steps that must be done before a state is loaded, because they may read its slot, by transfer.
    behind: HashMap<TransferId, u64>,
    /// Percent: how often a transfer ends in a turn.
    speed: usize,
    /// Percent of transfers that fail.
    failures: usize,
    /// Percent of turns in which a slot changes.
    decay: usize,
}

impl Media {
    /// Random media with so many slots of the host, of the disk, and of the host for states.
    pub fn new(rng: &mut Rng, [host, disk, states]: [usize; 3]) -> Self {
        let (speed, failures) = ([5, 50, 100][rng.below(3)], [0, 0, 20, 100][rng.below(4)]);
        let decay = [0, 0, 10][rng.below(3)];
        let (host, disk, states) = (vec![Vec::new(); host], vec![(None, Vec::new()); disk], vec![0; states]);
        Self { host, disk, states, in_flight: Vec::new(), behind: HashMap::new(), speed, failures, decay }
    }

    /// Takes transfers. Their targets have no defined contents until the end. `planned`: number of steps that were
    /// planned.
    pub fn start(&mut self, transfers: Vec<Transfer>, kv: &mut DeviceKv<'_>, planned: u64) {
        for transfer in transfers {
            self.behind.insert(transfer.id, if transfer.states.is_empty() { 0 } else { planned });
            for copy in &transfer.blocks {
                match transfer.direction {
                    Direction::Load => {
                        let range = kv.range(copy.block);
                        kv.values[range].fill(0xdead);
                    }
                    Direction::Write => self.disk[copy.block as usize].0 = None,
                    Direction::Store | Direction::Read => self.host[copy.slot as usize].clear(),
                    Direction::Erase => {}
                }
            }
            for copy in &transfer.states {
                if transfer.direction == Direction::Store {
                    self.states[copy.slot as usize] = 0xdead;
                }
            }
            self.in_flight.push(transfer);
        }
    }

    /// One turn. The copy happens as late as possible, when the transfer ends. `done`: number of steps that are done.
    pub fn turn(&mut self, rng: &mut Rng, kv: &mut DeviceKv<'_>, done: u64) -> Option<TransferDone> {
        if rng.chance(self.decay) {
            self.change_a_bit(rng);
        }
        if self.in_flight.is_empty() || !rng.chance(self.speed) {
            return None;
        }
        let chosen = rng.below(self.in_flight.len());
        let Transfer { id, direction, .. } = self.in_flight[chosen];
        // An erasure comes after the writes of its slot.
        let waits = |other: &Transfer| other.direction == Direction::Write && other.id < id;
        if self.behind[&id] > done || (direction == Direction::Erase && self.in_flight.iter().any(waits)) {
            return None;
        }
        let Transfer { id, direction, blocks, states, headers } = self.in_flight.swap_remove(chosen);
        self.behind.remove(&id);
        let took = Duration::from_micros(rng.below(1000) as u64);
        // What a failed transfer has copied is not known.
        let copied = if rng.chance(self.failures) { rng.below(blocks.len() + 1) } else { blocks.len() };
        let headers = headers.into_iter().map(Some).chain(std::iter::repeat(None));
        let checksums =
            blocks.iter().zip(headers).take(copied).map(|(copy, header)| self.copy(direction, *copy, header, kv));
        let mut checksums: Vec<u64> = checksums.collect();
        checksums.extend(states.iter().map(|copy| self.copy_state(direction, *copy, kv)));
        let result = if copied == blocks.len() { Ok(checksums) } else { Err("a test says so".into()) };
        Some(TransferDone { id, result, took })
    }

    fn copy(
        &mut self,
        direction: Direction,
        copy: BlockCopy,
        header: Option<SlotHeader>,
        kv: &mut DeviceKv<'_>,
    ) -> u64 {
        if direction == Direction::Erase {
            self.disk[copy.block as usize].0 = None;
            return 0;
        }
        let slot = &mut self.host[copy.slot as usize];
        match direction {
            Direction::Erase => {}
            Direction::Store => {
                let range = kv.range(copy.block);
                *slot = kv.values[range.clone()].iter().copied().zip(kv.adapters[range].iter().copied()).collect();
            }
            Direction::Load => {
                for (at, (value, adapter)) in kv.range(copy.block).zip(slot.iter()) {
                    (kv.values[at], kv.adapters[at]) = (*value, *adapter);
                }
            }
            Direction::Write => {
                self.disk[copy.block as usize] = (Some(header.expect("a write has headers")), slot.clone());
            }
            Direction::Read => {
                *slot = self.disk[copy.block as usize].1.clone();
            }
        }
        slot.iter().fold(0, |sum, (value, _)| mix(sum ^ value))
    }

    fn copy_state(&mut self, direction: Direction, copy: BlockCopy, kv: &mut DeviceKv<'_>) -> u64 {
        let (state, slot) = (&mut kv.states[copy.block as usize], &mut self.states[copy.slot as usize]);
        match direction {
            Direction::Load => *state = *slot,
            _ => *slot = *state,
        }
        mix(*slot)
    }

    fn change_a_bit(&mut self, rng: &mut Rng) {
        let slots = self.host.len() + self.disk.len();
        if !self.states.is_empty() && rng.chance(20) {
            let slot = rng.below(self.states.len());
            self.states[slot] ^= 1 << rng.below(64);
        }
        let slot = rng.below(slots);
        let values = match slot.checked_sub(self.host.len()) {
            None => Some(&mut self.host[slot]),
            Some(slot) => Some(&mut self.disk[slot].1),
        };
        if let Some(value) = values.and_then(|values| values.last_mut()) {
            value.0 ^= 1 << rng.below(64);
        }
    }

    /// Number of blocks that a start would find on the disk; `None` if copies fail, so that erasures may, too.
    pub fn on_disk(&self) -> Option<usize> {
        (self.failures == 0).then(|| self.disk.iter().filter(|(header, _)| header.is_some()).count())
    }

    /// True if there is a disk.
    pub fn has_disk(&self) -> bool {
        !self.disk.is_empty()
    }

    /// The process is killed and starts again. Returns what is found on the disk.
    pub fn restart(&mut self) -> Vec<(u32, SlotHeader)> {
        self.in_flight.clear();
        self.host.iter_mut().for_each(Vec::clear);
        // A block whose erasure was lost may have been written again elsewhere: one of them counts.
        let mut names = HashSet::new();
        let mut found = Vec::new();
        for (slot, (header, _)) in self.disk.iter_mut().enumerate() {
            *header = header.take().filter(|header| names.insert(header.name));
            found.extend(header.clone().map(|header| (slot as u32, header)));
        }
        found
    }
}
