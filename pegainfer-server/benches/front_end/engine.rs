//! A mock engine without cost: it generates tokens immediately, so that only the front end is measured.

use pegainfer_core::engine::{
    EngineError, EngineLimits, EngineStats, EventBatch, FinishReason, GenerateRequest, RequestId, StepEngine,
    TokenEvent, TokenOut, Usage,
};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Context length, and capacity of the KV pool, in tokens.
pub const CONTEXT: usize = 1 << 16;
/// Polling interval of a paced engine.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Generates the first token of a request immediately, and one more token of every request in each step.
pub struct InstantEngine {
    vocab_size: usize,
    /// The token that is always generated.
    token: u32,
    /// Time between decode steps.
    pace: Duration,
    next_step: Instant,
    requests: Vec<Running>,
    launched: bool,
    /// Reports when each request arrived.
    arrivals: Sender<Instant>,
}

struct Running {
    id: RequestId,
    prompt: usize,
    max_tokens: usize,
    generated: usize,
}

impl InstantEngine {
    /// An engine that decodes every `pace`, and a receiver of the requests' arrival times.
    pub fn new(vocab_size: usize, token: u32, pace: Duration) -> (Self, Receiver<Instant>) {
        let (arrivals, seen) = channel();
        let engine =
            Self { vocab_size, token, pace, next_step: Instant::now(), requests: vec![], launched: false, arrivals };
        (engine, seen)
    }

    fn decode(&mut self, only_new: bool) -> EventBatch {
        let mut events = EventBatch::new();
        let token = self.token;
        self.requests.retain_mut(|request| {
            if only_new && request.generated > 0 {
                return true;
            }
            request.generated += 1;
            events.push((
                request.id,
                TokenEvent::Token(TokenOut { id: token, is_stop: false, drafted: false, logprobs: None }),
            ));
            let complete = request.generated == request.max_tokens;
            if complete {
                let usage =
                    Usage { prompt_tokens: request.prompt, completion_tokens: request.generated, cached_tokens: 0 };
                events.push((request.id, TokenEvent::Finished { reason: FinishReason::Length, usage }));
            }
            !complete
        });
        events
    }
}

impl StepEngine for InstantEngine {
    fn limits(&self) -> EngineLimits {
        EngineLimits {
            max_model_len: CONTEXT,
            vocab_size: self.vocab_size,
            block_size: 16,
            kv_blocks: CONTEXT / 16,
            kv_cache_dtype: "bf16",
            max_num_seqs: 1024,
            eos_token_ids: vec![],
            num_speculative_tokens: None,
            image_token: None,
            unsupported: &[],
            max_loras: 0,
            hidden_size: 0,
        }
    }

    fn add(&mut self, id: RequestId, request: GenerateRequest) {
        // The receiver may be gone.
        let _ = self.arrivals.send(Instant::now());
        let (prompt, max_tokens) = (request.prompt.len(), request.max_tokens);
        self.requests.push(Running { id, prompt, max_tokens, generated: 0 });
    }

    fn cancel(&mut self, id: RequestId) {
        self.requests.retain(|request| request.id != id);
    }

    fn has_work(&self) -> bool {
        self.launched || !self.requests.is_empty()
    }

    fn plan(&mut self) -> Option<EventBatch> {
        let new = self.requests.iter().filter(|request| request.generated == 0);
        (!self.launched).then(|| new.map(|request| (request.id, TokenEvent::Admitted { cached_tokens: 0 })).collect())
    }

    fn launch(&mut self) -> Result<(), EngineError> {
        self.launched = true;
        Ok(())
    }

    fn finish(&mut self) -> Result<EventBatch, EngineError> {
        self.launched = false;
        let now = Instant::now();
        let due = self.next_step <= now;
        if due {
            self.next_step = now + self.pace;
        }
        let events = self.decode(!due);
        if events.is_empty() {
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(events)
    }

    fn abort_all(&mut self) -> Vec<RequestId> {
        self.launched = false;
        self.requests.drain(..).map(|request| request.id).collect()
    }

    fn reset_prefix_cache(&mut self) {}

    fn stats(&self) -> EngineStats {
        EngineStats { running: self.requests.len(), ..EngineStats::default() }
    }
}
