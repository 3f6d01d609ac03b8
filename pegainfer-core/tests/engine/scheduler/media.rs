//! Host memory and disk of a world: slow, failing, and with bits that change.

use crate::requests::{Rng, mix};
use pegainfer_core::adapter::AdapterId;
use pegainfer_core::kv::disk::SlotHeader;
use pegainfer_core::kv::tiers::{BlockCopy, Direction, Transfer, TransferDone, TransferId};
use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// A token's KV and the adapter that wrote it.
type Value = (u64, Option<AdapterId>);

/// What is found on a disk: blocks, and states.
pub type Found = [Vec<(u32, SlotHeader)>; 2];

/// Numbers of slots.
#[derive(Debug, Clone, Copy, Default)]
pub struct MediaSlots {
    pub host: usize,
    pub disk: usize,
    /// For states on the host and on the disk.
    pub host_states: usize,
    pub disk_states: usize,
}

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
    /// Slots of the disk for states.
    disk_states: Vec<(Option<SlotHeader>, u64)>,
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
    /// Random media with so many slots.
    pub fn new(rng: &mut Rng, slots: MediaSlots) -> Self {
        let (speed, failures) = ([5, 50, 100][rng.below(3)], [0, 0, 20, 100][rng.below(4)]);
        let decay = [0, 0, 10][rng.below(3)];
        let (host, disk) = (vec![Vec::new(); slots.host], vec![(None, Vec::new()); slots.disk]);
        let (states, disk_states) = (vec![0; slots.host_states], vec![(None, 0); slots.disk_states]);
        let (in_flight, behind) = (Vec::new(), HashMap::new());
        Self { host, disk, states, disk_states, in_flight, behind, speed, failures, decay }
    }

    /// Takes transfers. Their targets have no defined contents until the end. `planned`: number of steps that were
    /// planned.
    pub fn start(&mut self, transfers: Vec<Transfer>, kv: &mut DeviceKv<'_>, planned: u64) {
        for transfer in transfers {
            let of_device = matches!(transfer.direction, Direction::Store | Direction::Load);
            let waits = of_device && !transfer.states.is_empty();
            self.behind.insert(transfer.id, if waits { planned } else { 0 });
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
                match transfer.direction {
                    Direction::Store | Direction::Read => self.states[copy.slot as usize] = 0xdead,
                    Direction::Write => self.disk_states[copy.block as usize].0 = None,
                    Direction::Load | Direction::Erase => {}
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
        let all = blocks.len() + states.len();
        let copied = if rng.chance(self.failures) { rng.below(all + 1) } else { all };
        let headers = headers.into_iter().map(Some).chain(std::iter::repeat(None));
        let copies = blocks.iter().map(|copy| (false, copy)).chain(states.iter().map(|copy| (true, copy)));
        let checksums = copies.zip(headers).take(copied).map(|((is_state, copy), header)| match is_state {
            false => self.copy(direction, *copy, header, kv),
            true => self.copy_state(direction, *copy, header, kv),
        });
        let checksums: Vec<u64> = checksums.collect();
        let result = if copied == all { Ok(checksums) } else { Err("a test says so".into()) };
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

    fn copy_state(
        &mut self,
        direction: Direction,
        copy: BlockCopy,
        header: Option<SlotHeader>,
        kv: &mut DeviceKv<'_>,
    ) -> u64 {
        let (block, slot) = (copy.block as usize, copy.slot as usize);
        match direction {
            Direction::Erase => self.disk_states[block].0 = None,
            Direction::Store => self.states[slot] = kv.states[block],
            Direction::Load => kv.states[block] = self.states[slot],
            Direction::Write => {
                self.disk_states[block] = (Some(header.expect("a write has headers")), self.states[slot]);
            }
            Direction::Read => self.states[slot] = self.disk_states[block].1,
        }
        mix(self.states[slot])
    }

    fn change_a_bit(&mut self, rng: &mut Rng) {
        let slots = self.host.len() + self.disk.len();
        if !self.states.is_empty() && rng.chance(20) {
            let slot = rng.below(self.states.len());
            self.states[slot] ^= 1 << rng.below(64);
        }
        if !self.disk_states.is_empty() && rng.chance(20) {
            let slot = rng.below(self.disk_states.len());
            self.disk_states[slot].1 ^= 1 << rng.below(64);
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

    /// Numbers of blocks and of states that a start would find on the disk; `None` if copies fail, so that erasures
    /// may, too.
    pub fn on_disk(&self) -> Option<[usize; 2]> {
        let blocks = self.disk.iter().filter(|(header, _)| header.is_some()).count();
        let states = self.disk_states.iter().filter(|(header, _)| header.is_some()).count();
        (self.failures == 0).then_some([blocks, states])
    }

    /// True if there is a disk.
    pub fn has_disk(&self) -> bool {
        !self.disk.is_empty()
    }

    /// The process is killed and starts again. Returns what is found on the disk.
    pub fn restart(&mut self) -> Found {
        self.in_flight.clear();
        self.host.iter_mut().for_each(Vec::clear);
        self.states.fill(0xdead);
        [
            found(self.disk.iter_mut().map(|slot| &mut slot.0)),
            found(self.disk_states.iter_mut().map(|slot| &mut slot.0)),
        ]
    }
}

/// What a start finds by these headers. A block whose erasure was lost may have been written again elsewhere: one of
/// them counts.
fn found<'a>(headers: impl Iterator<Item = &'a mut Option<SlotHeader>>) -> Vec<(u32, SlotHeader)> {
    let (mut names, mut found) = (HashSet::new(), Vec::new());
    for (slot, header) in (0..).zip(headers) {
        *header = header.take().filter(|header| names.insert(header.name));
        found.extend(header.clone().map(|header| (slot, header)));
    }
    found
}
