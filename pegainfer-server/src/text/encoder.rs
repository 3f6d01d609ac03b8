//! Tokenization on its own threads.
//!
//! The async threads do not tokenize, because a text of megabytes would stall every stream on that thread, and because the
//! encoder builds tables for each thread that uses it (1 ms for 4,096 tokens, 20 ms for 150,000), which would add to some
//! request's TTFT. The threads of the CPU engine do not either, because a text would have to wait for a step.

use super::{Tokenizer, TokenizerError};
use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};
use std::sync::Arc;
use std::thread::available_parallelism;
use tokio::sync::oneshot;

/// Number of threads. One encodes 16,000 tokens in half a millisecond; a second one serves others while the first encodes
/// megabytes. Each thread has a table of 16 MB for a vocabulary of 150,000.
const MAX_THREADS: usize = 2;

/// A tokenizer and its threads, whose tables are built.
pub struct Encoder {
    tokenizer: Arc<Tokenizer>,
    threads: ThreadPool,
}

impl Encoder {
    /// Starts the threads and lets them build their tables.
    pub fn start(tokenizer: Arc<Tokenizer>) -> Result<Self, ThreadPoolBuildError> {
        let threads = ThreadPoolBuilder::new()
            .num_threads(available_parallelism().map_or(1, usize::from).min(MAX_THREADS))
            .thread_name(|i| format!("tokenizer-{i}"))
            // Without a handler, a panic in one request would end the server.
            .panic_handler(|_| log::error!("the tokenizer panicked; this is a bug"))
            .build()?;
        threads.broadcast(|_| warm_up(&tokenizer));
        Ok(Self { tokenizer, threads })
    }

    /// Runs short work that encodes on one of the threads, so that no tables are built for the caller's thread.
    pub fn run<T: Send>(&self, work: impl FnOnce(&Arc<Tokenizer>) -> T + Send) -> T {
        self.threads.install(|| work(&self.tokenizer))
    }

    /// Token ids of texts, see [`Tokenizer::encode`].
    pub async fn encode(&self, texts: Vec<String>, add_special_tokens: bool) -> Result<Vec<Vec<u32>>, TokenizerError> {
        let (done, encoded) = oneshot::channel();
        let tokenizer = self.tokenizer.clone();
        self.threads.spawn(move || {
            let encoded = texts.iter().map(|text| tokenizer.encode(text, add_special_tokens)).collect();
            // The receiver may be gone.
            let _ = done.send(encoded);
        });
        encoded.await.map_err(|_| TokenizerError::Panicked)?
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

    #[tokio::test]
    async fn texts_are_encoded_in_their_order() {
        let encoder = Encoder::start(Arc::new(testing::tokenizer())).unwrap();
        let texts: Vec<String> = (0..50).map(|i| format!("text number {i}")).collect();
        let expected: Vec<_> = texts.iter().map(|text| encoder.tokenizer.encode(text, true).unwrap()).collect();
        assert_eq!(encoder.encode(texts, true).await.unwrap(), expected);
    }
}
