//! Jobs between the callers of a store and its I/O threads.

use super::error::DiskFailure;
use super::job::Job;
use super::memory::SlotMemory;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Failures in a row after which the disk counts as failing.
const FAILING_AFTER: u32 = 8;

/// A finished job.
#[derive(Debug)]
pub struct Done<M> {
    /// The caller's number of the job.
    pub ticket: u64,
    /// Number of the slot.
    pub slot: u32,
    /// True for a read, false for a write or an erase.
    pub is_read: bool,
    /// The memory that the caller lent. `None` after an erase, and if the operating system may still access it.
    pub memory: Option<M>,
    /// Whether the job succeeded.
    pub result: Result<(), DiskFailure>,
    /// Time in the queue.
    pub waited: Duration,
    /// Time from the first transfer to the last one.
    pub took: Duration,
}

/// A job that was not accepted, with the memory of the caller.
#[derive(Debug)]
pub struct Refused<M> {
    /// The memory that the caller lent; `None` for an erase.
    pub memory: Option<M>,
    /// Why it was not accepted.
    pub reason: RefusedReason,
}

/// Why a job was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusedReason {
    /// Too many jobs of the kind are unfinished or not polled.
    Full,
    /// The slot is being written, or it is to be written and is being read.
    Busy,
}

/// How the slots are used by jobs that are not finished.
#[derive(Debug)]
enum Use {
    Readers(u32),
    Writer,
}

#[derive(Debug)]
struct State<M> {
    reads: VecDeque<Job<M>>,
    writes: VecDeque<Job<M>>,
    busy: HashMap<u32, Use>,
    /// Number of writes and erases, and of reads, that were accepted and are not polled.
    open: [usize; 2],
    /// Number of writes and erases that I/O threads have.
    writing: usize,
    done: Vec<Done<M>>,
    /// Number of failures since the last success.
    failures: u32,
    failed_at: Instant,
    is_closed: bool,
}

/// The bounded queue of a store.
pub(super) struct Queue<M> {
    state: Mutex<State<M>>,
    /// Tells I/O threads of new jobs.
    work: Condvar,
    /// Tells callers of finished jobs.
    finished: Condvar,
    /// Wakes an I/O thread that does not wait for `work`.
    doorbell: Box<dyn Fn() + Send + Sync>,
    /// Maximum number of open jobs of each kind.
    capacity: usize,
    /// Maximum number of writes and erases that I/O threads have, so that reads need not wait for many.
    max_writing: usize,
}

impl<M: SlotMemory> Queue<M> {
    /// An empty queue.
    pub fn new(capacity: usize, max_writing: usize, doorbell: Box<dyn Fn() + Send + Sync>) -> Self {
        let state = State {
            reads: VecDeque::new(),
            writes: VecDeque::new(),
            busy: HashMap::new(),
            open: [0; 2],
            writing: 0,
            done: Vec::new(),
            failures: 0,
            failed_at: Instant::now(),
            is_closed: false,
        };
        let (work, finished) = (Condvar::new(), Condvar::new());
        Self { state: Mutex::new(state), work, finished, doorbell, capacity, max_writing: max_writing.max(1) }
    }

    /// Adds a job.
    pub fn push(&self, job: Job<M>) -> Result<(), Refused<M>> {
        let mut state = self.lock();
        let refused = |job: Job<M>, reason| Err(Refused { memory: job.into_memory(), reason });
        let kind = usize::from(job.is_read());
        if state.is_closed || state.open[kind] >= self.capacity {
            return refused(job, RefusedReason::Full);
        }
        match (state.busy.get_mut(&job.slot), job.is_read()) {
            (Some(Use::Readers(readers)), true) => *readers += 1,
            (Some(_), _) => return refused(job, RefusedReason::Busy),
            (None, true) => _ = state.busy.insert(job.slot, Use::Readers(1)),
            (None, false) => _ = state.busy.insert(job.slot, Use::Writer),
        }
        state.open[kind] += 1;
        if job.is_read() {
            state.reads.push_back(job)
        } else {
            state.writes.push_back(job)
        }
        drop(state);
        self.work.notify_one();
        (self.doorbell)();
        Ok(())
    }

    /// The next job, if there is one.
    #[cfg(target_os = "linux")]
    pub fn take(&self) -> Option<Job<M>> {
        self.lock().take(self.max_writing)
    }

    /// The next job, after waiting for it; `None` after the queue was closed.
    pub fn take_or_wait(&self) -> Option<Job<M>> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.take(self.max_writing) {
                return Some(job);
            }
            if state.is_closed {
                return None;
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Hands a job back that was taken at `begun`. The memory is kept from the caller if `is_lost`: the operating
    /// system may still access it.
    pub fn finish(&self, job: Job<M>, begun: Instant, result: io::Result<()>, is_lost: bool) {
        let mut state = self.lock();
        if !job.is_read() {
            state.writing -= 1;
        }
        state.finish(job, begun, result, is_lost);
        drop(state);
        self.finished.notify_all();
        // A write may have waited for this one.
        self.work.notify_one();
    }

    /// Moves finished jobs to `done`.
    pub fn poll(&self, done: &mut Vec<Done<M>>) {
        self.lock().poll(done);
    }

    /// Waits until a job is finished, at most for `timeout`, and moves finished jobs to `done`.
    pub fn wait(&self, done: &mut Vec<Done<M>>, timeout: Duration) {
        let nothing = |state: &mut State<M>| state.done.is_empty() && !state.is_closed;
        let (mut state, _) =
            self.finished.wait_timeout_while(self.lock(), timeout, nothing).unwrap_or_else(PoisonError::into_inner);
        state.poll(done);
    }

    /// True after several failures in a row until a success, but at most for `pause` after the last failure; and after
    /// [`Self::close`].
    pub fn is_failing(&self, pause: Duration) -> bool {
        let state = self.lock();
        state.is_closed || (state.failures >= FAILING_AFTER && state.failed_at.elapsed() < pause)
    }

    /// True after [`Self::close`].
    #[cfg(target_os = "linux")]
    pub fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    /// Accepts no more jobs. Those that no I/O thread has taken fail.
    pub fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        let waiting: Vec<_> =
            std::mem::take(&mut state.reads).into_iter().chain(std::mem::take(&mut state.writes)).collect();
        for job in waiting {
            state.finish(job, Instant::now(), Err(io::Error::other("the store is closed")), false);
        }
        drop(state);
        self.finished.notify_all();
        self.work.notify_all();
        (self.doorbell)();
    }

    fn lock(&self) -> MutexGuard<'_, State<M>> {
        // No user code runs under the lock, so a poisoned queue is still consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: SlotMemory> State<M> {
    /// Reads come first, because requests wait for them; but one write is always under way.
    fn take(&mut self, max_writing: usize) -> Option<Job<M>> {
        let write_first = self.writing == 0 || self.reads.is_empty();
        if write_first
            && self.writing < max_writing
            && let Some(job) = self.writes.pop_front()
        {
            self.writing += 1;
            return Some(job);
        }
        self.reads.pop_front()
    }

    fn poll(&mut self, done: &mut Vec<Done<M>>) {
        for job in &self.done {
            self.open[usize::from(job.is_read)] -= 1;
        }
        done.append(&mut self.done);
    }

    fn finish(&mut self, job: Job<M>, begun: Instant, result: io::Result<()>, is_lost: bool) {
        match self.busy.get_mut(&job.slot) {
            Some(Use::Readers(readers)) if *readers > 1 => *readers -= 1,
            _ => _ = self.busy.remove(&job.slot),
        }
        if result.is_ok() {
            self.failures = 0;
        } else {
            (self.failures, self.failed_at) = (self.failures.saturating_add(1), Instant::now());
        }
        let Job { ticket, slot, submitted, .. } = job;
        let is_read = job.is_read();
        let operation = job.operation();
        let result = result.map_err(|error| DiskFailure { operation, slot, error });
        let waited = begun.saturating_duration_since(submitted);
        let took = begun.elapsed();
        let memory = if is_lost {
            std::mem::forget(job);
            None
        } else {
            job.into_memory()
        };
        self.done.push(Done { ticket, slot, is_read, memory, result, waited, took });
    }
}
