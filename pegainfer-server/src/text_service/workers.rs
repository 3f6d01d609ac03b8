//! Threads for work on requests, and turns of large work, which all models share.

#[cfg(test)]
mod tests;

use crate::fair_queue::{MAX_WAIT, Permits, QueueError, QueueLimits, Slots};
use crate::tenant::Tenant;
use crossbeam_channel::{Receiver, Sender};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, available_parallelism};
use thiserror::Error;
use tokio::sync::oneshot;

/// Number of threads. One encodes 16,000 tokens in half a millisecond; a second one serves others while the first
/// encodes a longer text. Each thread of an encoder has 16 MB of tables for a vocabulary of 150,000.
pub(super) const MAX_THREADS: usize = 2;
/// Permits per thread. Requests that arrive together are queued without waking a task for each, and delay another
/// client's request by milliseconds.
const QUEUED_PER_THREAD: usize = 8;
/// Work on more bytes than this gets its own thread, so that it does not delay ordinary requests. The thread ends with
/// the work, which frees the encoder's memory of the thread: up to 30 bytes per byte of the longest word.
pub const LARGE: usize = 256 << 10;
/// Work on more bytes than this can take seconds. It has a separate queue, so that agents' conversations, which are
/// large but smaller, do not wait for it.
const HUGE: usize = 2 << 20;

type Job = Box<dyn FnOnce() + Send>;

/// Why work on a text failed.
#[derive(Debug, Error)]
pub enum EncoderError {
    /// The tokenizer panicked, which is a bug.
    #[error("the tokenizer panicked; the server's log has the details")]
    Panicked,
    /// The system cannot start another thread.
    #[error("the system has no thread left for this request; try again later: {0}")]
    NoThread(String),
    /// Other requests use all threads.
    #[error("the requests that are parsed, rendered and tokenized take all threads: {0}; try again later")]
    Busy(QueueError),
}

/// Tells work that runs for a request whether the request still needs it.
pub struct CancelCheck<'a>(&'a dyn Fn() -> bool);

impl CancelCheck<'_> {
    /// True if the client left or its deadline passed: the result will not be used.
    pub fn is_cancelled(&self) -> bool {
        (self.0)()
    }
}

/// Threads that run jobs. They end when the last clone is dropped. Idle threads sleep, and each job wakes one. The
/// threads of a work-stealing pool would search for work first, which takes CPU time from the async threads after every
/// request.
#[derive(Clone)]
pub(super) struct JobThreads(Sender<Job>);

impl JobThreads {
    /// Starts the threads, and waits until each has run `prepare`.
    pub fn start(name: &str, prepare: impl Fn() + Clone + Send + 'static) -> io::Result<Self> {
        // The permits of `Workers` and the callers of `Encoder::run` bound its length.
        let (jobs, queue) = crossbeam_channel::unbounded();
        let (ready, all_ready) = crossbeam_channel::bounded::<()>(0);
        for i in 0..count() {
            let (prepare, queue, ready) = (prepare.clone(), queue.clone(), ready.clone());
            thread::Builder::new().name(format!("{name}-{i}")).spawn(move || {
                prepare();
                drop((ready, prepare));
                run_jobs(&queue);
            })?;
        }
        drop(ready);
        // Fails when every thread has dropped its sender.
        let _ = all_ready.recv();
        Ok(Self(jobs))
    }

    /// Queues a job.
    pub fn spawn(&self, work: impl FnOnce() + Send + 'static) {
        // The threads live as long as the sender.
        let _ = self.0.send(Box::new(work));
    }
}

/// Threads for work that needs no tokenizer, such as parsing a body, and the turns of all work. A body is read before
/// it is known which model it names.
pub struct Workers {
    /// Started by the first job.
    threads: Mutex<Option<JobThreads>>,
    /// Permits of the threads, and of those of encoders.
    shared: Slots,
    /// Permits of large work: one request per tenant at a time.
    large: Slots,
    /// Permits of the largest work: one request at a time.
    huge: Slots,
    /// Permits of large work outside a request's turn, such as writing a response.
    others: Slots,
}

impl Default for Workers {
    fn default() -> Self {
        let slots = |permits, per_tenant| Slots::new(QueueLimits::new(permits, per_tenant), MAX_WAIT);
        let shared = QUEUED_PER_THREAD * count();
        Self {
            threads: Mutex::default(),
            shared: slots(shared, shared),
            large: slots(2, 1),
            huge: slots(1, 1),
            others: slots(2, 1),
        }
    }
}

impl Workers {
    /// Runs work off the async threads without taking a request's turn, because it may hold resources that a request
    /// with a turn waits for. Example: writing a response. `bytes` is the size of its input. If the caller drops the
    /// future before the work has begun, it never begins.
    pub async fn work<T: Send + 'static>(
        &self,
        tenant: Tenant,
        bytes: usize,
        work: impl FnOnce(&CancelCheck<'_>) -> T + Send + 'static,
    ) -> Result<T, EncoderError> {
        if bytes <= LARGE {
            return self.share_thread(tenant, work).await;
        }
        let turn = self.others.acquire(tenant, 1).await.map_err(EncoderError::Busy)?;
        self.own_thread(turn, work).await
    }

    /// Waits for one of the shared threads, and runs work on it.
    pub async fn share_thread<T: Send + 'static>(
        &self,
        tenant: Tenant,
        work: impl FnOnce(&CancelCheck<'_>) -> T + Send + 'static,
    ) -> Result<T, EncoderError> {
        let threads = self.threads()?;
        self.share(&threads, tenant, work).await
    }

    /// Waits for one of `threads`, and runs work on it.
    pub(super) async fn share<T: Send + 'static>(
        &self,
        threads: &JobThreads,
        tenant: Tenant,
        work: impl FnOnce(&CancelCheck<'_>) -> T + Send + 'static,
    ) -> Result<T, EncoderError> {
        let turn = self.shared.acquire(tenant, 1).await.map_err(EncoderError::Busy)?;
        let (run, result) = job(turn, work);
        threads.spawn(run);
        result.await.map_err(|_| EncoderError::Panicked)
    }

    /// Waits until large work on `bytes` bytes may have its own thread.
    pub async fn large_turn(&self, tenant: Tenant, bytes: usize) -> Result<Permits, EncoderError> {
        let slots = if bytes <= HUGE { &self.large } else { &self.huge };
        slots.acquire(tenant, 1).await.map_err(EncoderError::Busy)
    }

    /// Runs large work on its own thread. `turn` is dropped when the thread ends, even if the caller left earlier: a
    /// client that leaves does not let the next one in early.
    pub async fn own_thread<T: Send + 'static>(
        &self,
        turn: impl Send + 'static,
        work: impl FnOnce(&CancelCheck<'_>) -> T + Send + 'static,
    ) -> Result<T, EncoderError> {
        let (run, result) = job(turn, work);
        let thread = thread::Builder::new().name("large-request".into()).spawn(run);
        thread.map_err(|e| EncoderError::NoThread(e.to_string()))?;
        result.await.map_err(|_| EncoderError::Panicked)
    }

    fn threads(&self) -> Result<JobThreads, EncoderError> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        if threads.is_none() {
            let started = JobThreads::start("worker", || ());
            *threads = Some(started.map_err(|error| EncoderError::NoThread(error.to_string()))?);
        }
        threads.clone().ok_or(EncoderError::Panicked)
    }
}

/// Number of threads of a pool.
fn count() -> usize {
    available_parallelism().map_or(1, usize::from).min(MAX_THREADS)
}

fn job<T: Send + 'static>(
    turn: impl Send + 'static,
    work: impl FnOnce(&CancelCheck<'_>) -> T + Send + 'static,
) -> (impl FnOnce() + Send + 'static, oneshot::Receiver<T>) {
    let (done, result) = oneshot::channel();
    let run = move || {
        let _turn = turn;
        if !done.is_closed() {
            let result = work(&CancelCheck(&|| done.is_closed()));
            // The receiver may be gone.
            let _ = done.send(result);
        }
    };
    (run, result)
}

/// Runs jobs until the channel closes. A panic ends only its job.
fn run_jobs(queue: &Receiver<Job>) {
    for job in queue {
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            log::error!("the tokenizer panicked; this is a bug");
        }
    }
}
