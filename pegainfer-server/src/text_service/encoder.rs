//! Tokenization on its own threads.
//!
//! The async threads do not tokenize: a text of megabytes would stall every stream on its thread, and the encoder
//! builds tables for each thread (1 ms for 4,096 tokens, 20 ms for 150,000), which would add to some request's TTFT.
//! The threads of the CPU engine do not tokenize, because a text would have to wait for a step. Each model has its own
//! threads, which end with it and so free their tables.

#[cfg(test)]
mod tests;

use super::workers::{CancelCheck, EncoderError, JobThreads, MAX_THREADS, Workers};
use crate::tenant::Tenant;
use pegainfer_text::{Tokenizer, TokenizerError};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

/// A tokenizer and its threads, with their tables built.
pub struct Encoder {
    tokenizer: Arc<Tokenizer>,
    threads: JobThreads,
}

impl Encoder {
    /// Starts the threads, which build their tables.
    pub fn start(tokenizer: Arc<Tokenizer>) -> io::Result<Self> {
        let warm = tokenizer.clone();
        let threads = JobThreads::start("tokenizer", move || warm_up(&warm))?;
        Ok(Self { tokenizer, threads })
    }

    /// Runs short work on one of the threads, so that no tables are built for the caller's thread. A panic of the work
    /// continues in the caller.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce(&Arc<Tokenizer>) -> T + Send + 'static) -> T {
        let (done, result) = crossbeam_channel::bounded(1);
        let tokenizer = self.tokenizer.clone();
        self.threads.spawn(move || {
            // The receiver waits.
            let _ = done.send(catch_unwind(AssertUnwindSafe(|| work(&tokenizer))));
        });
        match result.recv() {
            Ok(Ok(result)) => result,
            Ok(Err(panic)) => resume_unwind(panic),
            Err(closed) => resume_unwind(Box::new(closed)),
        }
    }

    /// Waits for one of the threads, in turn with all other work of `workers`, and runs work on it.
    pub async fn share_thread<T: Send + 'static>(
        &self,
        workers: &Workers,
        tenant: Tenant,
        work: impl FnOnce(&Arc<Tokenizer>, &CancelCheck<'_>) -> T + Send + 'static,
    ) -> Result<T, EncoderError> {
        let tokenizer = self.tokenizer.clone();
        workers.share(&self.threads, tenant, move |cancel| work(&tokenizer, cancel)).await
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
