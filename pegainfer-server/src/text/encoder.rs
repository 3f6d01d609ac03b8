//! Tokenization on its own threads.
//!
//! The async threads do not tokenize, because a text of megabytes would stall every stream on that thread, and because the
//! encoder builds tables for each thread that uses it (1 ms for 4,096 tokens, 20 ms for 150,000), which would add to some
//! request's TTFT. The threads of the CPU engine do not either, because a text would have to wait for a step.

use super::{Tokenizer, TokenizerError};
use crossbeam_channel::{Receiver, Sender};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread::{self, available_parallelism};
use tokio::sync::{Semaphore, oneshot};

/// Number of threads. One encodes 16,000 tokens in half a millisecond; a second one serves others while the first encodes
/// a longer text. Each thread has a table of 16 MB for a vocabulary of 150,000.
const MAX_THREADS: usize = 2;
/// Work on more bytes than this gets a thread of its own, so that it does not delay the work on ordinary requests. The
/// thread ends with the work, and takes with it what the encoder keeps for each thread: up to 30 bytes for each byte of the
/// longest word that it has seen.
const LARGE: usize = 256 << 10;

type Job = Box<dyn FnOnce() + Send>;

/// A tokenizer and its threads, whose tables are built.
pub struct Encoder {
    tokenizer: Arc<Tokenizer>,
    /// What the threads do next; they end when it is dropped. Idle threads sleep and each job wakes one: those of a work-stealing
    /// pool look for work first, which takes CPU time from the async threads after every request.
    jobs: Sender<Job>,
    /// One permit: large work runs one after the other.
    large: Arc<Semaphore>,
}

/// Tells work that runs for a request whether somebody still waits for it.
pub struct Caller<'a>(&'a dyn Fn() -> bool);

impl Caller<'_> {
    /// Whether the client went away or its deadline passed: the result will not be used.
    pub fn is_gone(&self) -> bool {
        (self.0)()
    }
}

impl Encoder {
    /// Starts the threads and lets them build their tables.
    pub fn start(tokenizer: Arc<Tokenizer>) -> io::Result<Self> {
        let (jobs, queue) = crossbeam_channel::unbounded();
        let (ready, all_ready) = crossbeam_channel::bounded::<()>(0);
        for i in 0..available_parallelism().map_or(1, usize::from).min(MAX_THREADS) {
            let (tokenizer, queue, ready) = (tokenizer.clone(), queue.clone(), ready.clone());
            thread::Builder::new().name(format!("tokenizer-{i}")).spawn(move || {
                warm_up(&tokenizer);
                drop(ready);
                work_off(&queue);
            })?;
        }
        drop(ready);
        // Fails when every thread has dropped its sender.
        let _ = all_ready.recv();
        Ok(Self { tokenizer, jobs, large: Arc::new(Semaphore::new(1)) })
    }

    fn spawn(&self, work: impl FnOnce() + Send + 'static) {
        // The threads live as long as the sender.
        let _ = self.jobs.send(Box::new(work));
    }

    /// Runs short work that encodes on one of the threads, so that no tables are built for the caller's thread. A panic of the work
    /// is the caller's.
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

    /// Runs work for a request off the async threads: parsing, rendering, encoding, decoding. `bytes`: size of what it works
    /// on. Work that has not begun when the caller drops the future never begins.
    pub async fn work<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce(&Arc<Tokenizer>, &Caller<'_>) -> T + Send + 'static,
    ) -> Result<T, TokenizerError> {
        let (done, result) = oneshot::channel();
        let tokenizer = self.tokenizer.clone();
        let run = move || {
            if done.is_closed() {
                return;
            }
            let result = work(&tokenizer, &Caller(&|| done.is_closed()));
            // The receiver may be gone.
            let _ = done.send(result);
        };
        if bytes <= LARGE {
            self.spawn(run);
        } else {
            // The permit goes with the thread: a client that leaves does not let the next one in early.
            let permit = self.large.clone().acquire_owned().await;
            let run = move || {
                run();
                drop(permit);
            };
            let thread = thread::Builder::new().name("large-request".into()).spawn(run);
            thread.map_err(|e| TokenizerError::NoThread(e.to_string()))?;
        }
        result.await.map_err(|_| TokenizerError::Panicked)
    }

    /// Token ids of texts, see [`Tokenizer::encode`].
    pub async fn encode(&self, texts: Vec<String>, add_special_tokens: bool) -> Result<Vec<Vec<u32>>, TokenizerError> {
        let bytes = texts.iter().map(String::len).sum();
        let encode = move |tokenizer: &Arc<Tokenizer>, caller: &Caller<'_>| {
            let texts = texts.iter().take_while(|_| !caller.is_gone());
            texts.map(|text| tokenizer.encode(text, add_special_tokens)).collect()
        };
        self.work(bytes, encode).await?
    }
}

/// Runs jobs until there are no more. A panic of one leaves the thread to the next.
fn work_off(queue: &Receiver<Job>) {
    for job in queue {
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            log::error!("the tokenizer panicked; this is a bug");
        }
    }
}

/// Lets the encoder spread a long text over two threads instead of all cores: each of its own threads keeps tables, and what
/// the longest word that it has seen took, for ever.
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

/// Encodes short texts, so that the thread's tables are built; results and errors are ignored. Texts of 64 KiB or more are
/// not warmed up: the encoder distributes them over all cores, each with tables of 2 MB, and all with one of 32 MB. Few
/// servers need these, and the first such text takes 30 ms longer, far less than its prefill.
fn warm_up(tokenizer: &Tokenizer) {
    let words: String = (0..1024).map(|i| format!("{} word{i}\n", i * 7919)).collect();
    for text in ["Once upon a time", &words] {
        let _ = tokenizer.encode(text, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use std::time::Duration;
    use tokio::time::timeout;

    #[tokio::test]
    async fn texts_are_encoded_in_their_order() {
        let encoder = Encoder::start(Arc::new(testing::tokenizer())).unwrap();
        let texts: Vec<String> = (0..50).map(|i| format!("text number {i}")).collect();
        let expected: Vec<_> = texts.iter().map(|text| encoder.tokenizer.encode(text, true).unwrap()).collect();
        assert_eq!(encoder.encode(texts, true).await.unwrap(), expected);
    }

    #[tokio::test]
    async fn large_work_leaves_the_threads_to_others_and_never_begins_for_nobody() {
        let encoder = Encoder::start(Arc::new(testing::tokenizer())).unwrap();
        let (release, held) = std::sync::mpsc::channel::<()>();
        let long = encoder.work(LARGE + 1, move |_, _| held.recv().is_ok());
        let abandoned = encoder.work(LARGE + 1, |_, _| panic!("nobody waits"));
        let mut long = std::pin::pin!(long);
        assert!(timeout(Duration::ZERO, long.as_mut()).await.is_err());
        drop(abandoned);
        let text = vec!["Once upon a time".to_string()];
        assert_eq!(encoder.encode(text, true).await.unwrap().len(), 1);
        let next = encoder.work(LARGE + 1, |_, caller| caller.is_gone());
        release.send(()).unwrap();
        assert_eq!((long.await.unwrap(), next.await.unwrap()), (true, false));
    }

    #[tokio::test]
    async fn a_panic_ends_no_thread() {
        let encoder = Encoder::start(Arc::new(testing::tokenizer())).unwrap();
        for _ in 0..2 * MAX_THREADS {
            let result = encoder.work(1, |_, _| panic!("a bug")).await;
            assert!(matches!(result, Err::<(), _>(TokenizerError::Panicked)));
        }
        assert_eq!(encoder.run(|_| 5), 5);
    }
}
