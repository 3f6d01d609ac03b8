//! Copies of KV blocks and states between host memory and files.

use super::progress::Progress;
use pegainfer_core::kv::disk::{AlignedMemory, DiskStore, Done, SlotKind};
use pegainfer_core::kv::tiers::{Direction, Transfer, TransferDone, TransferId};
use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

/// Time of a look at one of two files, while the other one works, too.
const SHORT_WAIT: Duration = Duration::from_millis(1);

/// The files, and transfers of which their threads have a part.
pub(super) struct Disk {
    /// One for blocks, then one for states if the model has some; by [`SlotKind`].
    files: Vec<SlotFile>,
    open: HashMap<TransferId, Open>,
    /// Number of the next job, and the transfer of each job, with the place of its block or state there.
    next: u64,
    jobs: HashMap<u64, (TransferId, usize)>,
    /// When a read last ended.
    last_read: Option<Instant>,
}

/// One of the files.
struct SlotFile {
    store: DiskStore<AlignedMemory>,
    /// Number of blocks that a slot is as large as.
    as_blocks: usize,
    /// Buffers for further jobs.
    spare: Vec<AlignedMemory>,
    /// Number of jobs that its threads have.
    jobs: usize,
}

/// A transfer that has begun.
struct Open {
    transfer: Transfer,
    since: Instant,
    /// Blocks and states that are not done.
    left: usize,
    failure: Option<String>,
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk").field("open", &self.open.len()).finish_non_exhaustive()
    }
}

impl Disk {
    /// Files for blocks and, if the model has some, for states.
    pub fn new(blocks: DiskStore<AlignedMemory>, states: Option<DiskStore<AlignedMemory>>) -> Self {
        let block_bytes = blocks.slot_bytes();
        let file = |store: DiskStore<AlignedMemory>| {
            let as_blocks = store.slot_bytes().div_ceil(block_bytes);
            SlotFile { store, as_blocks, spare: Vec::new(), jobs: 0 }
        };
        let files = [Some(blocks), states].into_iter().flatten().map(file).collect();
        Self { files, open: HashMap::new(), next: 0, jobs: HashMap::new(), last_read: None }
    }

    /// Gives the next blocks and states of a transfer to the files' threads, and counts them in `progress`: as many as
    /// the queues take, until they are as large as `left` blocks, which becomes what is left. `fill` copies a slot of
    /// the host into a buffer.
    pub fn submit(
        &mut self,
        progress: &mut Progress,
        left: &mut usize,
        mut fill: impl FnMut(SlotKind, u32, &mut [u8]) -> Result<(), String>,
    ) {
        let (id, all) = (progress.transfer.id, progress.all());
        let transfer = &progress.transfer;
        let new = || Open { transfer: transfer.clone(), since: Instant::now(), left: all, failure: None };
        let open = self.open.entry(id).or_insert_with(new);
        while *left > 0
            && let Some((kind, _)) = progress.next()
        {
            let Some(file) = self.files.get_mut(kind as usize) else {
                open.failure.get_or_insert_with(|| "there is no file for it".to_owned());
                return open.give_up(progress);
            };
            if file.store.is_failing() {
                open.failure = Some("the disk is failing".to_owned());
            }
            if open.failure.is_some() {
                return open.give_up(progress);
            }
            match file.begin(self.next, progress, &mut fill) {
                Ok(true) => {}
                Ok(false) => return,
                Err(why) => {
                    open.failure = Some(why);
                    continue;
                }
            }
            self.jobs.insert(self.next, (id, progress.begun));
            self.next += 1;
            progress.begun += 1;
            // The CPU has copied what is written: at most one state between two steps, as large as it is.
            let is_large = kind == SlotKind::State && progress.transfer.direction == Direction::Write;
            *left = if is_large { 0 } else { left.saturating_sub(file.as_blocks) };
        }
    }

    /// The transfers that have ended. `take` copies a buffer into a slot of the host.
    pub fn finished(
        &mut self,
        limit: Duration,
        mut take: impl FnMut(SlotKind, u32, &[u8]) -> Result<(), String>,
    ) -> Vec<TransferDone> {
        for (kind, Done { ticket, is_read, memory, result, .. }) in self.finished_jobs(limit) {
            let Some((id, at)) = self.jobs.remove(&ticket) else { continue };
            let Some(open) = self.open.get_mut(&id) else { continue };
            open.left -= 1;
            let copied = match (result, &memory, open.transfer.copy(at)) {
                (Ok(()), Some(memory), Some(copy)) if is_read => take(kind, copy.slot, memory.as_slice()),
                (result, ..) => result.map_err(|failure| failure.to_string()),
            };
            if let Err(why) = copied {
                open.failure.get_or_insert(why);
            }
            self.files[kind as usize].spare.extend(memory);
        }
        let (now, last_read) = (Instant::now(), self.last_read);
        let mut ended: Vec<(TransferId, Open)> = self.open.extract_if(|_, open| open.left == 0).collect();
        ended.sort_unstable_by_key(|(id, _)| *id);
        let is_read = |(_, open): &(TransferId, Open)| open.transfer.direction == Direction::Read;
        if ended.iter().any(is_read) {
            self.last_read = Some(now);
        }
        let end = |(id, open): (TransferId, Open)| {
            // Reads are queued one behind the other.
            let since = last_read.filter(|_| open.transfer.direction == Direction::Read).max(Some(open.since));
            let took = since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
            TransferDone { id, result: open.failure.map_or(Ok(Vec::new()), Err), took }
        };
        ended.into_iter().map(end).collect()
    }

    /// Jobs that have ended; waits up to `limit` for one.
    fn finished_jobs(&mut self, limit: Duration) -> Vec<(SlotKind, Done<AlignedMemory>)> {
        let busy = self.files.iter().filter(|file| file.jobs > 0).count();
        // Only one of them can be waited for.
        let mut limit = if busy > 1 { limit.min(SHORT_WAIT) } else { limit };
        let mut all = Vec::new();
        for (kind, file) in [SlotKind::Block, SlotKind::State].into_iter().zip(&mut self.files) {
            let mut done = Vec::new();
            if limit.is_zero() || file.jobs == 0 {
                file.store.poll(&mut done);
            } else {
                file.store.wait(&mut done, limit);
                limit = Duration::ZERO;
            }
            file.jobs -= done.len();
            all.extend(done.into_iter().map(|done| (kind, done)));
        }
        all
    }

    /// True while a transfer has not ended.
    pub fn is_busy(&self) -> bool {
        !self.open.is_empty()
    }
}

impl SlotFile {
    /// Gives the next block or state of a transfer to the threads as this job; false if the queue does not take it.
    fn begin(
        &mut self,
        job: u64,
        progress: &Progress,
        fill: &mut impl FnMut(SlotKind, u32, &mut [u8]) -> Result<(), String>,
    ) -> Result<bool, String> {
        let Some((kind, copy)) = progress.next() else { return Ok(false) };
        let pushed = if progress.transfer.direction == Direction::Erase {
            self.store.erase(job, copy.block)
        } else {
            let mut memory = self.spare.pop().unwrap_or_else(|| AlignedMemory::zeroed(self.store.slot_bytes()));
            if progress.transfer.direction == Direction::Write {
                fill(kind, copy.slot, memory.as_mut_slice())?;
                self.store.write(job, copy.block, &progress.transfer.headers[progress.begun], memory)
            } else {
                self.store.read(job, copy.block, memory)
            }
        };
        let refused = pushed.err();
        let is_taken = refused.is_none();
        self.spare.extend(refused.and_then(|refused| refused.memory));
        self.jobs += usize::from(is_taken);
        Ok(is_taken)
    }
}

impl Open {
    /// After a failure: what was not begun needs no end.
    fn give_up(&mut self, progress: &mut Progress) {
        self.left -= progress.all() - progress.begun;
        progress.begun = progress.all();
    }
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
