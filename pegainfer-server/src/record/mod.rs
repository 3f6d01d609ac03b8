//! Records requests for `pegainfer replay`: `serve --record FILE`.
//!
//! # Layout
//! - [`chain`]: hashes of a prompt. [`pegainfer_bench::recording`] defines the lines of the file.
//! - [`schedule`]: the events of the engine's scheduler, with `--record-steps`.
//! - [`writer`]: the thread that writes them; requests and steps never wait for it.
//!
//! Inputs are recorded, not outputs. With the prompt, parameters and seed of a request, the engine draws the same
//! tokens again on the same CPU, whatever else runs. Only the number and a hash of the tokens are kept, for comparison.

mod chain;
mod schedule;
mod writer;

use chain::Chain;
use pegainfer_bench::recording::format::{Added, Ended, Header, Reason, RecordLine, VERSION};
use pegainfer_bench::recording::{Prompts, TokenHash, keys};
use pegainfer_core::engine::GenerateRequest;
use pegainfer_core::schedule::recording::ScheduleSink;
use ring::hmac::{HMAC_SHA256, Key};
use ring::rand::SystemRandom;
use schedule::ScheduleLines;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use writer::RecordWriter;

/// A recording that is being written.
#[derive(Debug)]
pub struct Recorder {
    writer: RecordWriter,
    prompts: Prompts,
    /// Key of the hashes; it is never written to a file.
    key: Key,
    started: Instant,
    next: AtomicU64,
}

impl Recorder {
    /// Creates `file`, which must not exist, and writes its header. The recording ends when the file has `max_bytes`.
    ///
    /// # Errors
    /// The file or the writer thread cannot be created, or the system has no random numbers.
    pub fn create(file: &Path, prompts: Prompts, model: &str, max_bytes: u64) -> std::io::Result<Arc<Self>> {
        let key = Key::generate(HMAC_SHA256, &SystemRandom::new());
        let key = key.map_err(|_| std::io::Error::other("the operating system gives no random numbers"))?;
        let header = Header { record: VERSION, model: model.to_owned(), version: version(), prompts };
        let writer = RecordWriter::create(file, &header, max_bytes)?;
        Ok(Arc::new(Self { writer, prompts, key, started: Instant::now(), next: AtomicU64::new(0) }))
    }

    /// Records a request before it is submitted. For further choices, `first` is the first choice of the same prompt,
    /// whose line contains the prompt.
    pub fn add(self: &Arc<Self>, request: &GenerateRequest, first: Option<&Recording>) -> Recording {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (t, prompts) = (self.seconds(), self.prompts);
        let first = first.filter(|first| first.has_line);
        let (prompt, added) = match first {
            Some(first) => (first.prompt.clone(), Added::choice(t, id, request, prompts, first.id)),
            None => {
                let mut chain = (prompts == Prompts::Hashes).then(|| Chain::new(self.key.clone(), request.cache_salt));
                let hashes = chain.as_mut().map(|chain| chain.extend(&keys(&request.images, &request.prompt)));
                (chain, Added::new(t, id, request, prompts, hashes))
            }
        };
        let has_line = self.writer.write(&RecordLine::Added(Box::new(added)));
        Recording {
            recorder: self.clone(),
            id,
            tokens: 0,
            hash: TokenHash::default(),
            chain: prompt.clone(),
            prompt,
            has_line: has_line && first.is_none(),
            reason: Reason::Cancelled,
        }
    }

    /// True after the recording ended, although the server continues.
    pub fn has_ended(&self) -> bool {
        self.writer.has_ended()
    }

    /// Number of dropped lines.
    pub fn lost_lines(&self) -> u64 {
        self.writer.lost_lines()
    }

    /// The sink for the schedule of an engine.
    pub fn schedule(&self, engine: usize) -> Box<dyn ScheduleSink> {
        Box::new(ScheduleLines::new(self.writer.clone(), engine))
    }

    /// Waits until all lines are in the file.
    pub fn flush(&self) {
        self.writer.flush();
    }

    fn seconds(&self) -> f64 {
        (self.started.elapsed().as_secs_f64() * 1e6).round() / 1e6
    }
}

fn version() -> String {
    env!("CARGO_PKG_VERSION").to_owned()
}

/// A recorded request. Its end is recorded when it is dropped: as cancelled, unless another reason was set.
#[derive(Debug)]
pub struct Recording {
    recorder: Arc<Recorder>,
    id: u64,
    tokens: usize,
    hash: TokenHash,
    /// Hashes of the prompt and the generated tokens.
    chain: Option<Chain>,
    /// Hashes of the prompt, the start of further choices.
    prompt: Option<Chain>,
    /// True if its line, with the prompt, is in the file.
    has_line: bool,
    reason: Reason,
}

impl Recording {
    /// Adds a generated token.
    pub fn token(&mut self, id: u32) {
        self.tokens += 1;
        self.hash.push(id);
        if let Some(chain) = &mut self.chain {
            chain.push(id);
        }
    }

    /// Records how the engine ended the request.
    pub fn ended(&mut self, reason: Reason) {
        self.reason = reason;
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let hashes = self.chain.take().map(Chain::into_new);
        let (t, end, tokens, reason) = (self.recorder.seconds(), self.id, self.tokens, self.reason);
        let hash = self.hash.to_string();
        self.recorder.writer.write(&RecordLine::Ended(Ended { t, end, tokens, reason, hash, hashes }));
    }
}
