//! The store: a KV file and the threads that read and write it.

use super::backend::{self, Backend};
use super::config::DiskConfig;
use super::contents::prepare;
use super::error::DiskError;
use super::files::Files;
use super::format::{FirstPage, Geometry, PAGE, SlotHeader};
use super::job::{Job, Task};
use super::memory::SlotMemory;
use super::opened::Opened;
use super::queue::{Done, Queue, Refused};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// If a disk hangs longer than this while the store is dropped, its threads are left behind.
const CLOSING: Duration = Duration::from_secs(5);

/// A preallocated file of slots for KV blocks. Jobs are executed by other threads; no method waits for the disk.
///
/// Dropping the store waits for transfers under way, and drops jobs that no thread has begun.
pub struct DiskStore<M: SlotMemory> {
    queue: Arc<Queue<M>>,
    geometry: Geometry,
    slot_tokens: usize,
    epoch: u64,
    secret: [u8; 32],
    /// Number of the next write.
    sequence: AtomicU64,
    threads: Vec<JoinHandle<()>>,
    pause: Duration,
    /// Time that dropping waits for transfers under way.
    closing: Duration,
}

impl<M: SlotMemory> DiskStore<M> {
    /// Opens or creates the file, locks it, reads which blocks it has, and starts the threads.
    ///
    /// A file that PegaInfer did not write is an error and stays as it is. A file of another model, size or version is
    /// made new.
    pub fn open(config: &DiskConfig) -> Result<(Self, Opened), DiskError> {
        let begun = Instant::now();
        let path = &config.path;
        let geometry = Geometry::fit(config.bytes, config.slot_bytes, config.slot_tokens)?;
        let wanted = FirstPage {
            geometry,
            // Zero is the epoch of empty headers.
            epoch: u64::from_le_bytes(random()?) | 1,
            fingerprint: config.fingerprint,
            secret: random()?,
        };
        let want_direct = config.direct && config.slot_bytes.is_multiple_of(PAGE);
        let (files, is_new, not_direct) = Files::open(path, want_direct, config.lock_wait)?;
        let prepared = prepare(&files, path, wanted).inspect_err(|_| {
            if is_new {
                // Nobody else has it: it is locked.
                _ = std::fs::remove_file(path);
            }
        });
        let (page, contents, reset) = prepared?;
        let next = contents.found.last().map_or(0, |found| found.sequence + 1);
        let backend = backend::start(config, Arc::new(files), geometry)?;
        let opened = Opened {
            found: contents.found,
            kind: config.kind,
            slots: geometry.slots,
            damaged: contents.damaged,
            missing: contents.missing,
            duplicates: contents.duplicates,
            reset,
            not_direct,
            no_ring: backend.no_ring.clone(),
            took: begun.elapsed(),
        };
        Ok((Self::new(backend, page, config, next), opened))
    }

    /// A store over a started backend, whose next write has this sequence number.
    pub(super) fn new(backend: Backend<M>, page: FirstPage, config: &DiskConfig, sequence: u64) -> Self {
        let Backend { queue, threads, .. } = backend;
        let FirstPage { geometry, epoch, secret, .. } = page;
        let (slot_tokens, pause, closing) = (config.slot_tokens, config.pause, CLOSING);
        let sequence = AtomicU64::new(sequence);
        Self { queue, geometry, slot_tokens, epoch, secret, sequence, threads, pause, closing }
    }

    /// The store, with another limit of the time that dropping it takes.
    #[cfg(test)]
    pub(super) fn with_closing(mut self, closing: Duration) -> Self {
        self.closing = closing;
        self
    }

    /// Random bytes that the file keeps, so that keyed names of blocks are the same after a restart.
    pub fn secret(&self) -> [u8; 32] {
        self.secret
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.geometry.slots
    }

    /// Bytes of a slot's payload.
    pub fn slot_bytes(&self) -> usize {
        self.geometry.slot_bytes
    }

    /// Saves a block in `slot`, whatever it held. Until the job has succeeded, the slot is empty for a later start.
    ///
    /// # Panics
    /// If there is no such slot, if the memory has not [`slot_bytes`](Self::slot_bytes) bytes, or if there are more
    /// tokens than configured.
    pub fn write(&self, ticket: u64, slot: u32, header: &SlotHeader, memory: M) -> Result<(), Refused<M>> {
        self.check(slot, Some(&memory));
        assert!(header.tokens.len() <= self.slot_tokens, "{} tokens in a slot", header.tokens.len());
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let header = header.encode(self.epoch, slot, sequence);
        self.queue.push(Job::new(ticket, slot, Task::Write(memory, header)))
    }

    /// Reads the payload of `slot`. The caller compares its checksum with that of the header.
    ///
    /// # Panics
    /// If there is no such slot, or if the memory has not [`slot_bytes`](Self::slot_bytes) bytes.
    pub fn read(&self, ticket: u64, slot: u32, memory: M) -> Result<(), Refused<M>> {
        self.check(slot, Some(&memory));
        self.queue.push(Job::new(ticket, slot, Task::Read(memory)))
    }

    /// Empties `slot`, so that a later start does not find its block. Not needed before [`write`](Self::write).
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn erase(&self, ticket: u64, slot: u32) -> Result<(), Refused<M>> {
        self.check(slot, None);
        self.queue.push(Job::new(ticket, slot, Task::Erase))
    }

    /// Moves finished jobs to `done`.
    pub fn poll(&self, done: &mut Vec<Done<M>>) {
        self.queue.poll(done);
    }

    /// Waits until a job is finished, at most for `timeout`, and moves finished jobs to `done`.
    pub fn wait(&self, done: &mut Vec<Done<M>>, timeout: Duration) {
        self.queue.wait(done, timeout);
    }

    /// True if the disk should be left alone: for [`DiskConfig::pause`] after the last of 8 or more failures in a row.
    /// After the pause jobs are worth a try: a success ends the series, and a failure begins the next pause. Also true
    /// if nothing can be read or written any more.
    pub fn is_failing(&self) -> bool {
        self.queue.is_failing(self.pause)
    }

    fn check(&self, slot: u32, memory: Option<&M>) {
        assert!(slot < self.slots(), "slot {slot} of {}", self.slots());
        let bytes = memory.map_or(self.slot_bytes(), SlotMemory::len);
        assert!(bytes == self.slot_bytes(), "{bytes} bytes for a slot of {}", self.slot_bytes());
    }
}

impl<M: SlotMemory> Drop for DiskStore<M> {
    fn drop(&mut self) {
        self.queue.close();
        let deadline = Instant::now() + self.closing;
        while self.threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        for thread in self.threads.drain(..).filter(JoinHandle::is_finished) {
            _ = thread.join();
        }
    }
}

impl<M: SlotMemory> fmt::Debug for DiskStore<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskStore").field("geometry", &self.geometry).finish_non_exhaustive()
    }
}

/// Random bytes of the operating system.
fn random<const N: usize>() -> Result<[u8; N], DiskError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| DiskError::Random(error.to_string()))?;
    Ok(bytes)
}
