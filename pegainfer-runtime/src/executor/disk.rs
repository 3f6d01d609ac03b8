//! Copies of KV blocks between host memory and a file.

use super::progress::Progress;
use pegainfer_core::kv::disk::{AlignedMemory, DiskStore, Done};
use pegainfer_core::kv::tiers::{Direction, Transfer, TransferDone, TransferId};
use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

/// The file, and transfers of which the file's threads have a part.
pub(super) struct Disk {
    store: DiskStore<AlignedMemory>,
    open: HashMap<TransferId, Open>,
    /// Buffers for further jobs.
    spare: Vec<AlignedMemory>,
    /// Number of the next job, and the transfer and the block of each job.
    next: u64,
    jobs: HashMap<u64, (TransferId, usize)>,
}

/// A transfer that has begun.
struct Open {
    transfer: Transfer,
    since: Instant,
    /// Blocks that are not done.
    left: usize,
    failure: Option<String>,
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk").field("open", &self.open.len()).finish_non_exhaustive()
    }
}

impl Disk {
    pub fn new(store: DiskStore<AlignedMemory>) -> Self {
        Self { store, open: HashMap::new(), spare: Vec::new(), next: 0, jobs: HashMap::new() }
    }

    /// Gives the next blocks of a transfer to the file's threads, and counts them in `progress`: up to `most`, and as
    /// many as the queue takes. `fill` copies a slot of the host into a buffer.
    pub fn submit(
        &mut self,
        progress: &mut Progress,
        most: usize,
        mut fill: impl FnMut(u32, &mut [u8]) -> Result<(), String>,
    ) {
        let transfer = &progress.transfer;
        let id = transfer.id;
        let open = self.open.entry(id).or_insert_with(|| Open {
            transfer: transfer.clone(),
            since: Instant::now(),
            left: transfer.blocks.len(),
            failure: None,
        });
        if self.store.is_failing() {
            open.failure = Some("the disk is failing".to_owned());
        }
        for _ in 0..most {
            let Some(copy) = transfer.blocks.get(progress.begun) else { return };
            if open.failure.is_some() {
                // What was not begun needs no end.
                open.left -= transfer.blocks.len() - progress.begun;
                progress.begun = transfer.blocks.len();
                return;
            }
            let mut memory = self.spare.pop().unwrap_or_else(|| AlignedMemory::zeroed(self.store.slot_bytes()));
            let job = self.next;
            let pushed = match transfer.direction {
                Direction::Write => match fill(copy.slot, memory.as_mut_slice()) {
                    Ok(()) => self.store.write(job, copy.block, &transfer.headers[progress.begun], memory),
                    Err(why) => {
                        open.failure = Some(why);
                        continue;
                    }
                },
                Direction::Erase => {
                    self.spare.push(memory);
                    self.store.erase(job, copy.block)
                }
                _ => self.store.read(job, copy.block, memory),
            };
            if let Err(refused) = pushed {
                self.spare.extend(refused.memory);
                return;
            }
            self.jobs.insert(job, (id, progress.begun));
            self.next += 1;
            progress.begun += 1;
        }
    }

    /// The transfers that have ended. `take` copies a buffer into a slot of the host.
    pub fn finished(
        &mut self,
        limit: Duration,
        mut take: impl FnMut(u32, &[u8]) -> Result<(), String>,
    ) -> Vec<TransferDone> {
        let mut done: Vec<Done<AlignedMemory>> = Vec::new();
        if limit.is_zero() {
            self.store.poll(&mut done)
        } else {
            self.store.wait(&mut done, limit)
        }
        for Done { ticket, is_read, memory, result, .. } in done {
            let Some((id, block)) = self.jobs.remove(&ticket) else { continue };
            let Some(open) = self.open.get_mut(&id) else { continue };
            open.left -= 1;
            let copied = match (result, &memory) {
                (Ok(()), Some(memory)) if is_read => take(open.transfer.blocks[block].slot, memory.as_slice()),
                (result, _) => result.map_err(|failure| failure.to_string()),
            };
            if let Err(why) = copied {
                open.failure.get_or_insert(why);
            }
            self.spare.extend(memory);
        }
        let ended = self.open.extract_if(|_, open| open.left == 0);
        let end = |(id, open): (TransferId, Open)| {
            let result = open.failure.map_or(Ok(Vec::new()), Err);
            TransferDone { id, result, took: open.since.elapsed() }
        };
        ended.map(end).collect()
    }

    /// True while a transfer has not ended.
    pub fn is_busy(&self) -> bool {
        !self.open.is_empty()
    }
}
