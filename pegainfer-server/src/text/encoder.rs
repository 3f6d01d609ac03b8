//! Tokenization on threads of its own.
//!
//! Not on those that serve connections: a text of megabytes would hold up every stream, and the encoder builds tables for
//! each thread that uses it (1 ms for 4,096 tokens, 20 ms for 150,000), which would be some client's time to first token.
//! Not on those of the CPU engine either, where it would wait for a step.

use super::{Tokenizer, TokenizerError};
use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};
use std::sync::Arc;
use std::thread::available_parallelism;
use tokio::sync::oneshot;

/// One encodes 16,000 tokens in half a millisecond; the second is there while the first has megabytes. Each has a table
/// of 16 MB for a vocabulary of 150,000.
const MAX_THREADS: usize = 2;

/// A tokenizer and its threads, which have seen texts before.
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

    /// Runs something short that encodes on one of the threads, so that the caller's gets no tables for it.
    pub fn run<T: Send>(&self, work: impl FnOnce(&Arc<Tokenizer>) -> T + Send) -> T {
        self.threads.install(|| work(&self.tokenizer))
    }

    /// Token ids of some texts, see [`Tokenizer::encode`].
    pub async fn encode(&self, texts: Vec<String>, add_special_tokens: bool) -> Result<Vec<Vec<u32>>, TokenizerError> {
        let (done, encoded) = oneshot::channel();
        let tokenizer = self.tokenizer.clone();
        self.threads.spawn(move || {
            let encoded = texts.iter().map(|text| tokenizer.encode(text, add_special_tokens)).collect();
            // Who asked may have gone.
            let _ = done.send(encoded);
        });
        encoded.await.map_err(|_| TokenizerError::Panicked)?
    }
}

/// What comes out, an error too, is nobody's. No text here is long: the encoder shares those of 64 KiB or more among all
/// cores, each with tables of 2 MB and all with one of 32 MB. Few servers need them, and the first such text, whose prompt
/// takes the model longer by far, can wait the 30 ms.
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
