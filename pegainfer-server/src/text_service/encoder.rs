//! Tokenization on its own threads.
//!
//! The async threads do not tokenize: a text of megabytes would stall every stream on its thread, and the encoder
//! builds tables for each thread (1 ms for 4,096 tokens, 20 ms for 150,000), which would add to some request's TTFT.
//! The threads of the CPU engine do not tokenize, because a text would have to wait for a step.

#[cfg(test)]
mod tests;

use crate::fair_queue::{MAX_WAIT, Permits, QueueError, QueueLimits, Slots};
use crate::tenant::Tenant;
use crossbeam_channel::{Receiver, Sender};
use pegainfer_text::{Tokenizer, TokenizerError};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread::{self, available_parallelism};
use thiserror::Error;
use tokio::sync::oneshot;

/// Number of threads. One encodes 16,000 tokens in half a millisecond; a second one serves others while the first
/// encodes a longer text. Each has 16 MB of tables for a vocabulary of 150,000.
const MAX_THREADS: usize = 2;
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

/// A tokenizer and its threads, with their tables built.
pub struct Encoder {
    tokenizer: Arc<Tokenizer>,
    /// Jobs of the threads, which end when it is dropped. Idle threads sleep, and each job wakes one. The threads of a
    /// work-stealing pool would search for work first, which takes CPU time from the async threads after every request.
    jobs: Sender<Job>,
    /// Permits of the threads.
    threads: Slots,
    /// Permits of large work: one request per tenant at a time.
    large: Slots,
    /// Permits of the largest work: one request at a time.
    huge: Slots,
    /// Permits of large work outside a request's turn, such as writing a response.
    others: Slots,
}

/// Tells work that runs for a request whether the request still needs it.
pub struct CancelCheck<'a>(&'a dyn Fn() -> bool);

impl CancelCheck<'_> {
    /// True if the client left or its deadline passed: the result will not be used.
    pub fn is_cancelled(&self) -> bool {
        (self.0)()
    }
}

impl Encoder {
    /// Starts the threads, which build their tables.
    pub fn start(tokenizer: Arc<Tokenizer>) -> io::Result<Self> {
        // The permits of `threads` and the callers of `run` bound its length.
        let (jobs, queue) = crossbeam_channel::unbounded();
        let (ready, all_ready) = crossbeam_channel::bounded::<()>(0);
        let threads = available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
        for i in 0..threads {
            let (tokenizer, queue, ready) = (tokenizer.clone(), queue.clone(), ready.clone());
            thread::Builder::new().name(format!("tokenizer-{i}")).spawn(move || {
                warm_up(&tokenizer);
                drop(ready);
                run_jobs(&queue);
            })?;
        }
        drop(ready);
        // Fails when every thread has dropped its sender.
        let _ = all_ready.recv();
        let slots = |permits, per_tenant| Slots::new(QueueLimits::new(permits, per_tenant), MAX_WAIT);
        Ok(Self {
            tokenizer,
            jobs,
            threads: slots(QUEUED_PER_THREAD * threads, QUEUED_PER_THREAD * threads),
            large: slots(2, 1),
            huge: slots(1, 1),
            others: slots(2, 1),
        })
    }

    fn spawn(&self, work: impl FnOnce() + Send + 'static) {
        // The threads live as long as the sender.
        let _ = self.jobs.send(Box::new(work));
    }

    /// Runs short work on one of the threads, so that no tables are built for the caller's thread. A panic of the work
    /// continues in the caller.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce(&Arc<Tokenizer>) -> T + Send + 'static) -> T {
        let (done, result) = crossbeam_channel::bounded(1);
        let tokenizer = self.tokenizer.clone();
        self.spawn(move || {
            // The receiver waits.
            let _ = done.send(catch_unwind(AssertUnwindSafe(|| work(&tokenizer))));
        });
        match result.recv() {
            Ok(Ok(result)) => result,
            Ok(Err(panic)) => resume_unwind(panic),
            Err(closed) => resume_unwind(Box::new(closed)),
        }
    }

    /// Runs work off the async threads without taking a request's turn, because it may hold resources that a request
    /// with a turn waits for. Example: writing a response. `bytes` is the size of its input. If the caller drops the
    /// future before the work has begun, it never begins.
    pub async fn work<T: Send + 'static>(
        &self,
        tenant: Tenant,
        bytes: usize,
        work: impl FnOnce(&Arc<Tokenizer>, &CancelCheck<'_>) -> T + Send + 'static,
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
        work: impl FnOnce(&Arc<Tokenizer>, &CancelCheck<'_>) -> T + Send + 'static,
    ) -> Result<T, EncoderError> {
        let turn = self.threads.acquire(tenant, 1).await.map_err(EncoderError::Busy)?;
        let (run, result) = self.job(turn, work);
        self.spawn(run);
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
        work: impl FnOnce(&Arc<Tokenizer>, &CancelCheck<'_>) -> T + Send + 'static,
    ) -> Result<T, EncoderError> {
        let (run, result) = self.job(turn, work);
        let thread = thread::Builder::new().name("large-request".into()).spawn(run);
        thread.map_err(|e| EncoderError::NoThread(e.to_string()))?;
        result.await.map_err(|_| EncoderError::Panicked)
    }

    fn job<T: Send + 'static>(
        &self,
        turn: impl Send + 'static,
        work: impl FnOnce(&Arc<Tokenizer>, &CancelCheck<'_>) -> T + Send + 'static,
    ) -> (impl FnOnce() + Send + 'static, oneshot::Receiver<T>) {
        let (done, result) = oneshot::channel();
        let tokenizer = self.tokenizer.clone();
        let run = move || {
            let _turn = turn;
            if !done.is_closed() {
                let result = work(&tokenizer, &CancelCheck(&|| done.is_closed()));
                // The receiver may be gone.
                let _ = done.send(result);
            }
        };
        (run, result)
    }
}

/// Work that encodes texts.
pub fn encode(
    texts: Vec<String>,
    add_special_tokens: bool,
) -> impl FnOnce(&Arc<Tokenizer>, &CancelCheck<'_>) -> Result<Vec<Vec<u32>>, TokenizerError> + Send + 'static {
    move |tokenizer, cancel| {
        let texts = texts.iter().take_while(|_| !cancel.is_cancelled());
        texts.map(|text| tokenizer.encode(text, add_special_tokens)).collect()
    }
}

/// Runs jobs until the channel closes. A panic ends only its job.
fn run_jobs(queue: &Receiver<Job>) {
    for job in queue {
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            log::error!("the tokenizer panicked; this is a bug");
        }
    }
}

/// Lets the encoder spread a long text over two threads instead of all cores. Each of its own threads keeps its tables,
/// and the memory of the longest word that it has seen, forever.
///
/// # Safety
/// No other thread may run: this sets an environment variable.
pub unsafe fn limit_encoder_threads() {
    const VARIABLE: &str = "FASTOKENS_BPE_THREADS";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: the caller guarantees that no other thread reads the environment.
        unsafe { std::env::set_var(VARIABLE, MAX_THREADS.to_string()) };
    }
}

/// Encodes short texts, which builds the thread's tables. Results and errors are ignored. Texts of 64 KiB or more are
/// not warmed up: the encoder distributes them over all cores, with 2 MB of tables each and 32 MB together. Few servers
/// need these, and the first such text takes 30 ms longer, far less than its prefill.
fn warm_up(tokenizer: &Tokenizer) {
    let words: String = (0..1024).map(|i| format!("{} word{i}\n", i * 7919)).collect();
    for text in ["Once upon a time", &words] {
        let _ = tokenizer.encode(text, true);
    }
}
