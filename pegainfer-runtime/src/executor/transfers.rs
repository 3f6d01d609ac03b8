//! Copies of KV blocks and states between the device, host memory and files.

use super::disk::Disk;
use super::host_slots::slot_bytes;
use super::progress::Progress;
use super::rank::Rank;
use crate::load_error::LoadError;
use crate::model::Model;
use pegainfer_core::exec::Device;
use pegainfer_core::host_memory;
use pegainfer_core::kv::disk::{AlignedMemory, DiskStore, SlotKind};
use pegainfer_core::kv::tiers::{Direction, Transfer, TransferDone};
use pegainfer_core::parallel::Ranks;
use pegainfer_core::tensor::OpError;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that the CPU copies between two steps.
const BYTES_AT_ONCE: usize = 16 << 20;
/// Bytes whose copies a GPU is given between two steps: 10 ms of its link.
const DEVICE_BYTES_AT_ONCE: usize = 512 << 20;
/// Bytes per second of the link of a GPU: after a longer step, as many bytes are loaded, because requests wait for them.
const LINK_RATE: f64 = 50e9;

/// Transfers that are not done, oldest first.
#[derive(Debug, Default)]
pub(super) struct Transfers {
    queue: VecDeque<Progress>,
    /// Copies between device and host that have begun.
    begun: Vec<Progress>,
    disk: Option<Disk>,
    /// Bytes of a slot over all ranks.
    slot_bytes: usize,
    /// True if a GPU copies, while the CPU does something else.
    on_device: bool,
    /// When loads were last begun.
    last: Option<Instant>,
}

impl Transfers {
    /// Bytes of a block and of a state over all ranks; an error, as a sentence, if this model has no copies.
    pub fn sizes<M: Model>(ranks: &mut Ranks<Rank<M>>) -> Result<[usize; 2], LoadError> {
        let refused = |why: &str| Err(LoadError::Option(format!("--kv-offloading-size: {why}")));
        let all = Mutex::new(Some([0; 2]));
        ranks.run(|rank| {
            let tensors = M::kept_tensors(rank.cache_mut());
            let own = tensors.map(|tensors| [slot_bytes(&tensors.blocks), slot_bytes(&tensors.states)]);
            let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
            *all = all.zip(own).map(|(all, own)| [all[0] + own[0], all[1] + own[1]]);
            Ok(())
        })?;
        match all.into_inner().unwrap_or_default() {
            Some(sizes) => Ok(sizes),
            None => refused(&format!("{} keeps state outside of KV blocks, which has no copies yet", M::NAME)),
        }
    }

    /// Reserves host memory of up to `bytes` bytes for copies of blocks and states of these sizes; half of it for
    /// states, if the model has some. Returns the numbers of slots.
    pub fn open_host_slots<M: Model>(
        &mut self,
        ranks: &mut Ranks<Rank<M>>,
        bytes: u64,
        sizes: [usize; 2],
    ) -> Result<[usize; 2], LoadError> {
        let refused = |why: String| Err(LoadError::Option(format!("--kv-offloading-size: {why}")));
        if let Some(available) = host_memory::available().filter(|available| *available < bytes) {
            let [bytes, available] = [bytes, available].map(|bytes| bytes as f64 / (1u64 << 30) as f64);
            return refused(format!(
                "{bytes:.1} GiB are more than the {available:.1} GiB of memory that are available"
            ));
        }
        let has_states = sizes[1] > 0;
        let share = usize::try_from(bytes).unwrap_or(usize::MAX) / if has_states { 2 } else { 1 };
        let slots = [share / sizes[0].max(1), if has_states { share / sizes[1] } else { 0 }];
        if slots[0] == 0 {
            let (tokens, size) = (M::BLOCK_TOKENS, sizes[0]);
            return refused(format!("{bytes} bytes hold no block; one of {tokens} tokens has {size} bytes"));
        }
        if has_states && slots[1] == 0 {
            return refused(format!("half of {bytes} bytes holds no state, which has {} bytes", sizes[1]));
        }
        ranks.run(|rank| rank.open_host_tier(slots))?;
        self.slot_bytes = sizes[0];
        self.on_device = ranks.first().exec.device() == Device::Cuda;
        Ok(slots)
    }

    /// Also copies blocks to this file, and states to the other one.
    pub fn use_disk(&mut self, blocks: DiskStore<AlignedMemory>, states: Option<DiskStore<AlignedMemory>>) {
        self.disk = Some(Disk::new(blocks, states));
    }

    /// Starts a transfer. A GPU begins with a load at once, after the steps that were launched; returns transfers that
    /// failed.
    pub fn start<M: Model>(&mut self, ranks: &mut Ranks<Rank<M>>, transfer: Transfer) -> Vec<TransferDone> {
        let is_urgent = self.on_device && transfer.direction == Direction::Load;
        self.queue.push_back(Progress::new(transfer));
        if is_urgent { self.begin_loads(ranks) } else { Vec::new() }
    }

    /// True if a GPU copies, or host memory for that is not ready.
    pub fn waits_for_device(&self) -> bool {
        self.on_device && !(self.queue.is_empty() && self.begun.is_empty())
    }

    /// True if a transfer waits for the disk, and none is to be copied here.
    pub fn waits_for_disk(&self) -> bool {
        self.queue.is_empty() && self.begun.is_empty() && self.disk.as_ref().is_some_and(Disk::is_busy)
    }

    /// Copies as many bytes as fit between two steps, and returns the transfers that are done. Waits up to `limit` for
    /// the disk.
    pub fn copy_some<M: Model>(&mut self, ranks: &mut Ranks<Rank<M>>, limit: Duration) -> Vec<TransferDone> {
        let mut done = match &mut self.disk {
            Some(disk) => disk.finished(limit, |kind, slot, bytes| write_slot(ranks, (kind, slot), bytes)),
            None => Vec::new(),
        };
        if self.on_device {
            done.extend(self.begin_loads(ranks));
        }
        done.extend(self.begin_some(ranks));
        done.extend(finish_copies(ranks, &mut self.begun));
        done
    }

    /// Begins with as many loads as a GPU copies in the time since this was last called, before all other copies: they
    /// are of blocks that nobody else copies. Returns transfers that failed.
    fn begin_loads<M: Model>(&mut self, ranks: &mut Ranks<Rank<M>>) -> Vec<TransferDone> {
        let since = self.last.replace(Instant::now()).map_or(Duration::ZERO, |last| last.elapsed());
        let bytes = DEVICE_BYTES_AT_ONCE.max((since.as_secs_f64().min(1.0) * LINK_RATE) as usize);
        let (mut left, mut done, mut later) = ((bytes / self.slot_bytes.max(1)).max(1), Vec::new(), VecDeque::new());
        while let Some(progress) = self.queue.pop_front() {
            if left > 0 && progress.transfer.direction == Direction::Load {
                later.extend(self.begin_one(ranks, progress, &mut left, &mut done));
            } else {
                later.push_back(progress);
            }
        }
        self.queue = later;
        done
    }

    /// Begins with a transfer between device and host, and counts its blocks in `left`. Returns it if it has more.
    fn begin_one<M: Model>(
        &mut self,
        ranks: &mut Ranks<Rank<M>>,
        mut progress: Progress,
        left: &mut usize,
        done: &mut Vec<TransferDone>,
    ) -> Option<Progress> {
        let begun = progress.begun;
        match begin_copies(ranks, &mut progress, *left) {
            Ok(all) => {
                *left = left.saturating_sub(progress.begun - begun);
                if !all {
                    return Some(progress);
                }
                self.begun.push(progress);
            }
            Err(error) => {
                // The error above is the one to report; one of the driver comes again.
                let _ = ranks.run(|rank| rank.give_up_copies(progress.transfer.id));
                done.push(progress.failed(&error));
            }
        }
        None
    }

    /// Begins with as many copies as fit between two steps, except loads of a GPU, and returns transfers that failed.
    fn begin_some<M: Model>(&mut self, ranks: &mut Ranks<Rank<M>>) -> Vec<TransferDone> {
        let at_once = if self.on_device { DEVICE_BYTES_AT_ONCE } else { BYTES_AT_ONCE };
        let mut left = (at_once / self.slot_bytes.max(1)).max(1);
        let (mut disk, mut done) = (self.disk.take(), Vec::new());
        let (mut later, mut is_full) = (VecDeque::new(), [false; 2]);
        while left > 0
            && let Some(mut progress) = self.queue.pop_front()
        {
            match (progress.transfer.direction, &mut disk) {
                (Direction::Load, _) if self.on_device => {
                    later.push_back(progress);
                    continue;
                }
                (Direction::Store | Direction::Load, _) => {
                    later.extend(self.begin_one(ranks, progress, &mut left, &mut done));
                    continue;
                }
                // In order for each file, because they may be of one slot. Reads need not wait for them.
                (Direction::Write | Direction::Erase, Some(_)) if is_full[file_of(&progress)] => {}
                (Direction::Write | Direction::Read | Direction::Erase, Some(disk)) => {
                    let fill = |kind, slot, bytes: &mut [u8]| read_slot(ranks, (kind, slot), bytes);
                    disk.submit(&mut progress, &mut left, fill);
                }
                (Direction::Write | Direction::Read | Direction::Erase, None) => {
                    done.push(progress.failed(&OpError { op: "host tier", message: "there is no disk".to_owned() }));
                    continue;
                }
            }
            if progress.next().is_some() {
                is_full[file_of(&progress)] |= progress.transfer.direction != Direction::Read;
                later.push_back(progress);
            }
        }
        later.append(&mut self.queue);
        (self.queue, self.disk) = (later, disk);
        done
    }
}

/// Number of the file that a transfer writes to, or erases.
fn file_of(progress: &Progress) -> usize {
    let kind = if progress.transfer.blocks.is_empty() { SlotKind::State } else { SlotKind::Block };
    kind as usize
}

/// Begins to copy up to `most` blocks between device and host, none if the memory of the host is not ready. True if the
/// whole transfer has begun.
fn begin_copies<M: Model>(ranks: &mut Ranks<Rank<M>>, progress: &mut Progress, most: usize) -> Result<bool, OpError> {
    let Transfer { id, direction, blocks, states, .. } = &progress.transfer;
    let blocks = &blocks[progress.begun..];
    let capacity = AtomicUsize::new(most);
    ranks.run(|rank| {
        capacity.fetch_min(rank.host_tier()?.capacity([blocks, states]), Ordering::Relaxed);
        Ok(())
    })?;
    let capacity = capacity.into_inner();
    if capacity == 0 {
        return Ok(false);
    }
    let blocks = &blocks[..blocks.len().min(capacity)];
    // With the last blocks.
    let ends = progress.begun + blocks.len() == progress.transfer.blocks.len();
    let states = if ends { &states[..] } else { &[] };
    ranks.run(|rank| rank.begin_copies((*id, *direction), [blocks, states], ends))?;
    progress.begun += blocks.len();
    progress.since.get_or_insert_with(Instant::now);
    Ok(ends)
}

/// Takes what is done out of `begun`.
fn finish_copies<M: Model>(ranks: &mut Ranks<Rank<M>>, begun: &mut Vec<Progress>) -> Vec<TransferDone> {
    let mut ended = |progress: &mut Progress| {
        let (id, all) = (progress.transfer.id, AtomicBool::new(true));
        let looked = ranks.run(|rank| {
            let is_done = rank.host_tier()?.is_done(id)?;
            all.fetch_and(is_done, Ordering::Relaxed);
            Ok(())
        });
        let taken = match looked {
            Ok(()) if !all.into_inner() => return None,
            Ok(()) => take_sums(ranks, &progress.transfer),
            Err(error) => Err(error),
        };
        let on_host = progress.since.map_or(Duration::ZERO, |since| since.elapsed());
        let took = taken.as_ref().ok().and_then(|(_, on_device)| *on_device).unwrap_or(on_host);
        Some(TransferDone { id, result: taken.map(|(sums, _)| sums).map_err(|error| error.to_string()), took })
    };
    let mut done = Vec::new();
    begun.retain_mut(|progress| {
        let ended = ended(progress);
        done.extend(ended.clone());
        ended.is_none()
    });
    done
}

/// The checksum of each block, and then of each state, over all ranks, and the time that the devices took.
fn take_sums<M: Model>(
    ranks: &mut Ranks<Rank<M>>,
    transfer: &Transfer,
) -> Result<(Vec<u64>, Option<Duration>), OpError> {
    let taken = Mutex::new((vec![0u64; transfer.blocks.len() + transfer.states.len()], None));
    ranks.run(|rank| {
        let (own, took) = rank.host_tier()?.take_sums(transfer.id)?;
        let (sums, longest) = &mut *taken.lock().unwrap_or_else(PoisonError::into_inner);
        // In any order of the ranks.
        sums.iter_mut().zip(own).for_each(|(sum, own)| *sum = sum.wrapping_add(own));
        *longest = took.max(*longest);
        Ok(())
    })?;
    Ok(taken.into_inner().unwrap_or_default())
}

/// Copies a slot of the host, the part of one rank after the other, to `bytes`.
fn read_slot<M: Model>(
    ranks: &mut Ranks<Rank<M>>,
    (kind, slot): (SlotKind, u32),
    bytes: &mut [u8],
) -> Result<(), String> {
    let (part, bytes) = (bytes.len() / ranks.count(), Mutex::new(bytes));
    let copied = ranks.run(|rank| {
        let mut bytes = bytes.lock().unwrap_or_else(PoisonError::into_inner);
        bytes[rank.shard.rank * part..][..part].copy_from_slice(rank.host_tier()?.slot(kind, slot));
        Ok(())
    });
    copied.map_err(|error| error.to_string())
}

/// Copies `bytes` to a slot of the host; see [`read_slot`].
fn write_slot<M: Model>(ranks: &mut Ranks<Rank<M>>, (kind, slot): (SlotKind, u32), bytes: &[u8]) -> Result<(), String> {
    let part = bytes.len() / ranks.count();
    let copied = ranks.run(|rank| {
        let own = &bytes[rank.shard.rank * part..][..part];
        rank.host_tier()?.slot(kind, slot).copy_from_slice(own);
        Ok(())
    });
    copied.map_err(|error| error.to_string())
}
