//! I/O by io_uring: one thread keeps many transfers under way.

use super::files::Files;
use super::format::Geometry;
use super::job::{Job, Outcome};
use super::memory::SlotMemory;
use super::queue::Queue;
use io_uring::{IoUring, Probe, opcode, squeue, types::Fd};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

/// User data of the transfer that waits for the doorbell.
const DOORBELL: u64 = u64::MAX;

/// A ring that no thread runs yet.
pub(super) struct Ring {
    ring: IoUring,
    doorbell: Arc<OwnedFd>,
    depth: usize,
}

/// The thread's state.
struct Driver<M> {
    ring: IoUring,
    queue: Arc<Queue<M>>,
    files: Arc<Files>,
    geometry: Geometry,
    /// Jobs with a transfer under way, and when they were taken from the queue.
    jobs: Vec<Option<(Job<M>, Instant)>>,
    /// Indices of `jobs` without one.
    free: Vec<usize>,
    /// Where the count of the doorbell is read to; stays at its address.
    rings: Box<u64>,
    doorbell: Arc<OwnedFd>,
    is_listening: bool,
}

impl Ring {
    /// A ring for `depth` transfers at a time. Fails where the kernel or a seccomp profile forbids it.
    pub fn new(depth: usize) -> Result<Self> {
        let depth = depth.max(1);
        // One more for the doorbell.
        let ring = IoUring::new(u32::try_from(depth + 1).unwrap_or(u32::MAX))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if ![opcode::Read::CODE, opcode::Write::CODE].iter().all(|code| probe.is_supported(*code)) {
            return Err(ErrorKind::Unsupported.into());
        }
        Ok(Self { ring, doorbell: Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?), depth })
    }

    /// A function that wakes the thread.
    pub fn doorbell(&self) -> Box<dyn Fn() + Send + Sync> {
        let doorbell = self.doorbell.clone();
        // Cannot fail: the count never comes near 2^64.
        Box::new(move || _ = rustix::io::write(&*doorbell, &1u64.to_ne_bytes()))
    }

    /// Starts the thread.
    pub fn start<M: SlotMemory>(
        self,
        queue: &Arc<Queue<M>>,
        files: Arc<Files>,
        geometry: Geometry,
    ) -> Result<JoinHandle<()>> {
        let driver = Driver {
            ring: self.ring,
            queue: queue.clone(),
            files,
            geometry,
            jobs: (0..self.depth).map(|_| None).collect(),
            free: (0..self.depth).collect(),
            rings: Box::new(0),
            doorbell: self.doorbell,
            is_listening: false,
        };
        Builder::new().name("kv-disk".to_owned()).spawn(move || driver.run())
    }
}

impl<M: SlotMemory> Driver<M> {
    /// Runs until the queue is closed and no transfer is under way.
    fn run(mut self) {
        if let Err(error) = self.serve() {
            log::error!("io_uring failed, and the KV file is not used any more: {error}");
            self.abandon(&error);
        }
    }

    fn serve(&mut self) -> Result<()> {
        loop {
            let is_closed = self.queue.is_closed();
            while let Some(index) = self.free.last().copied() {
                let Some(job) = self.queue.take() else { break };
                self.free.pop();
                self.jobs[index] = Some((job, Instant::now()));
                self.begin(index)?;
            }
            // After the queue was closed, nothing rings: the transfer that waits for the doorbell has ended, or was
            // rung by closing.
            if is_closed && self.free.len() == self.jobs.len() && !self.is_listening {
                return Ok(());
            }
            if !is_closed && !self.is_listening {
                self.listen()?;
            }
            match self.ring.submit_and_wait(1) {
                // The completions below make space.
                Err(error) if matches!(error.raw_os_error().map(Errno::from_raw_os_error), Some(Errno::BUSY)) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                result => _ = result?,
            }
            self.complete()?;
        }
    }

    /// Submits the next transfer of a job.
    fn begin(&mut self, index: usize) -> Result<()> {
        let Some((job, _)) = &self.jobs[index] else { return Ok(()) };
        let transfer = job.transfer(&self.geometry);
        let file = Fd(self.files.handle(transfer.direct).as_raw_fd());
        // A transfer is at most 1 GiB.
        let len = transfer.len as u32;
        let entry = if transfer.write {
            opcode::Write::new(file, transfer.start, len).offset(transfer.offset).build()
        } else {
            opcode::Read::new(file, transfer.start, len).offset(transfer.offset).build()
        };
        // SAFETY: the job, and with it the memory, stays in `jobs` until the transfer has completed, and so does
        // `files`.
        unsafe { self.push(entry.user_data(index as u64)) }
    }

    /// Waits for the doorbell, beside the transfers.
    fn listen(&mut self) -> Result<()> {
        let count = std::ptr::from_mut(&mut *self.rings).cast();
        let entry = opcode::Read::new(Fd(self.doorbell.as_raw_fd()), count, size_of::<u64>() as u32).build();
        // SAFETY: `rings` and `doorbell` live until the transfer has completed: `serve` does not end before.
        unsafe { self.push(entry.user_data(DOORBELL))? };
        self.is_listening = true;
        Ok(())
    }

    /// Adds an entry to the submission queue.
    ///
    /// # Safety
    /// The memory and the file of the entry stay until it has completed.
    unsafe fn push(&mut self, entry: squeue::Entry) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| Error::other("the submission queue is full"))
    }

    /// Advances the jobs with completed transfers.
    fn complete(&mut self) -> Result<()> {
        let completed: Vec<_> = self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        for (user_data, result) in completed {
            if user_data == DOORBELL {
                self.is_listening = false;
                continue;
            }
            let index = user_data as usize;
            let result = usize::try_from(result).map_err(|_| Error::from_raw_os_error(-result));
            let Some((job, _)) = &mut self.jobs[index] else { continue };
            match job.advance(&self.geometry, result) {
                Outcome::More => self.begin(index)?,
                Outcome::Finished(result) => {
                    let Some((job, begun)) = self.jobs[index].take() else { continue };
                    self.free.push(index);
                    self.queue.finish(job, begun, result, false);
                }
            }
        }
        Ok(())
    }

    /// Gives all jobs up. The memory of those under way is never freed, because the kernel may still access it.
    fn abandon(mut self, error: &Error) {
        self.queue.close();
        for (job, begun) in self.jobs.iter_mut().filter_map(Option::take) {
            let result = Err(Error::new(error.kind(), error.to_string()));
            self.queue.finish(job, begun, result, true);
        }
        if self.is_listening {
            Box::leak(self.rings);
        }
    }
}
