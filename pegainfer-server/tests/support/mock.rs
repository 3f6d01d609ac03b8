//! A scripted engine: one token per step and request, always the same reply.

use super::tokenizer;
use pegainfer_core::engine::{
    EngineError, EngineLimits, EngineStats, EventBatch, FinishReason, GenerateRequest, RequestId, StepEngine,
    TokenEvent, TokenLogprobs, TokenOut, Usage,
};
use pegainfer_core::kv::tiers::TierStats;
use pegainfer_core::ledger::{
    EngineDetail, ExpertCounts, FinishedStep, Law, OpShares, StepLine, StepLoad, StepLog, Watch,
};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// `<|im_end|>` of the bundled tokenizer.
pub const EOS: u32 = 4089;
/// `<|endoftext|>`, the other EOS token.
pub const EOS_2: u32 = 4087;

/// Writes the reply to one prompt.
pub type Script = Box<dyn FnOnce(&str) -> String + Send>;

/// Observes and controls the engine from a test.
#[derive(Default)]
pub struct Control {
    /// Requests in the order of arrival.
    pub added: Mutex<Vec<GenerateRequest>>,
    /// Number of cancelled requests.
    pub cancelled: AtomicUsize,
    /// Number of resets of the prefix cache.
    pub resets: AtomicUsize,
    /// Number of tokens generated so far, over all requests.
    pub tokens: AtomicUsize,
    /// Maximum number of tokens over all requests, until it is raised.
    pub allowance: AtomicUsize,
    /// Replies to the next requests, each computed from its prompt; then the engine's own reply.
    pub scripts: Mutex<VecDeque<Script>>,
    /// Fault injection: the next step fails.
    pub fail: AtomicBool,
    /// Fault injection: the grammars of all running requests fail.
    pub fail_grammars: AtomicBool,
    /// Fault injection: the failure is fatal for the engine.
    pub fatal: AtomicBool,
    /// Fault injection: the next step panics.
    pub panic: AtomicBool,
    /// Fault injection: steps do not end while this is set, like on a GPU that hangs.
    pub hang: AtomicBool,
}

impl Control {
    /// The latest request.
    pub fn last(&self) -> GenerateRequest {
        self.added.lock().unwrap().last().unwrap().clone()
    }

    /// The latest request's prompt, special tokens included.
    pub fn prompt_text(&self) -> String {
        tokenizer().decode_all(&self.last().prompt)
    }

    /// Scripts the reply to the next request that has no script yet.
    pub fn script(&self, reply: impl FnOnce(&str) -> String + Send + 'static) {
        self.scripts.lock().unwrap().push_back(Box::new(reply));
    }

    /// Number of requests.
    pub fn added(&self) -> usize {
        self.added.lock().unwrap().len()
    }

    /// Number of cancelled requests.
    pub fn cancelled(&self) -> usize {
        self.cancelled.load(Ordering::SeqCst)
    }

    /// Allows `n` tokens in total.
    pub fn allow(&self, n: usize) {
        self.allowance.store(n, Ordering::SeqCst);
    }
}

/// The scripted engine.
pub struct MockEngine {
    control: Arc<Control>,
    reply: Vec<u32>,
    max_num_seqs: usize,
    max_model_len: usize,
    waiting: VecDeque<Running>,
    running: Vec<Running>,
    launched: bool,
    stats: EngineStats,
}

struct Running {
    id: RequestId,
    request: GenerateRequest,
    reply: Vec<u32>,
    generated: usize,
}

impl MockEngine {
    /// An engine that replies to every request with `reply` and EOS, without delay.
    pub fn replying(reply: &str) -> (Self, Arc<Control>) {
        let ids = tokenizer().encode(reply, false).unwrap();
        Self::replying_ids(ids)
    }

    /// Like [`replying`](Self::replying), with the reply as tokens.
    pub fn replying_ids(reply: Vec<u32>) -> (Self, Arc<Control>) {
        let control = Arc::new(Control::default());
        control.allow(usize::MAX);
        let engine = Self {
            control: control.clone(),
            reply,
            max_num_seqs: 64,
            max_model_len: 512,
            waiting: VecDeque::new(),
            running: vec![],
            launched: false,
            stats: EngineStats { kv_blocks_total: 64, ..EngineStats::default() },
        };
        (engine, control)
    }

    /// Limits the number of concurrent requests.
    pub fn with_max_num_seqs(mut self, n: usize) -> Self {
        self.max_num_seqs = n;
        self
    }

    /// Pretends that blocks and states have copies on the host and in files.
    pub fn with_tiers(mut self) -> Self {
        let blocks = TierStats { host_slots: 2, host_used: 1, disk_slots: 2, slot_bytes: 64, ..TierStats::default() };
        self.stats.tiers = TierStats { state_slots: 2, state_disk_slots: 2, state_bytes: 64, ..blocks };
        self
    }

    /// Sets a larger context length.
    pub fn with_max_model_len(mut self, tokens: usize) -> Self {
        self.max_model_len = tokens;
        self
    }

    fn next_token(&self, at: usize) -> u32 {
        let Running { request, reply, generated, .. } = &self.running[at];
        match reply.get(*generated) {
            Some(&id) => id,
            None if request.ignore_eos => reply[generated % reply.len()],
            None => EOS,
        }
    }

    /// Generates one token of one request; true if the request is complete.
    fn step(&mut self, at: usize, events: &mut EventBatch) -> bool {
        let id = self.next_token(at);
        let Running { id: name, request, generated, .. } = &mut self.running[at];
        *generated += 1;
        self.stats.generation_tokens += 1;
        let is_stop = request.stop_token_ids.contains(&id) || ([EOS, EOS_2].contains(&id) && !request.ignore_eos);
        let logprobs = request.logprobs.map(|n| TokenLogprobs {
            logprob: -0.5,
            rank: 1,
            top: (0..n).map(|i| (id + i as u32, -0.5 - i as f32)).collect(),
        });
        let logprobs = logprobs.map(Box::new);
        if request.vector && *generated == 1 {
            events.push((*name, TokenEvent::Vector(Box::new([1.0, 2.0, -2.0]))));
        }
        events.push((*name, TokenEvent::Token(TokenOut { id, is_stop, drafted: false, logprobs })));
        let reason = match (is_stop, *generated == request.max_tokens) {
            (true, _) => FinishReason::Stop(id),
            (false, true) => FinishReason::Length,
            (false, false) => return false,
        };
        let usage = Usage {
            prompt_tokens: request.prompt.len(),
            completion_tokens: *generated,
            cached_tokens: cached(request),
        };
        events.push((*name, TokenEvent::Finished { reason, usage }));
        true
    }
}

/// Half of every prompt, which the mock finds in its prefix cache.
fn cached(request: &GenerateRequest) -> usize {
    request.prompt.len() / 2
}

/// A log that compares steps with a ledger, and counts experts.
fn step_log() -> StepLog {
    let line = |rows: &[(usize, usize)]| {
        let load = StepLoad::of_rows(rows.iter().copied());
        StepLine { load, us: 1000.0, spread: 0.0, runs: 1 }
    };
    let law = Law::new(&[line(&[(1, 1)]), line(&[(2, 2)])], false).unwrap();
    let log = StepLog::new(Instant::now());
    log.watch(Watch::new(law, OpShares::default()));
    for i in 0..5 {
        let (load, took) = (StepLoad::of_rows([(1 + i, 7)]), Duration::from_millis(2));
        log.add(&FinishedStep { load, now: Instant::now(), took, ops: &[], engine: &EngineDetail::default });
    }
    log.add_experts(&ExpertCounts { layer: 0, tokens: vec![3, 61] });
    log
}

impl StepEngine for MockEngine {
    fn step_log(&self) -> Option<Arc<StepLog>> {
        Some(Arc::new(step_log()))
    }

    fn limits(&self) -> EngineLimits {
        EngineLimits {
            max_model_len: self.max_model_len,
            vocab_size: 4096,
            block_size: 16,
            kv_blocks: self.max_model_len.div_ceil(16).max(64),
            kv_cache_dtype: "bf16",
            max_num_seqs: self.max_num_seqs,
            eos_token_ids: vec![EOS, EOS_2],
            num_speculative_tokens: Some(2),
            image_token: None,
            unsupported: &[],
            max_loras: 0,
            hidden_size: 3,
        }
    }

    fn add(&mut self, id: RequestId, request: GenerateRequest) {
        self.control.added.lock().unwrap().push(request.clone());
        let script = self.control.scripts.lock().unwrap().pop_front();
        let scripted = script.map(|script| {
            let tokenizer = tokenizer();
            tokenizer.encode(&script(&tokenizer.decode_all(&request.prompt)), false).unwrap()
        });
        let reply = scripted.unwrap_or_else(|| self.reply.clone());
        self.waiting.push_back(Running { id, request, reply, generated: 0 });
    }

    fn cancel(&mut self, id: RequestId) {
        self.control.cancelled.fetch_add(1, Ordering::SeqCst);
        self.waiting.retain(|r| r.id != id);
        self.running.retain(|r| r.id != id);
    }

    fn has_work(&self) -> bool {
        self.launched || !self.waiting.is_empty() || !self.running.is_empty()
    }

    fn plan(&mut self) -> Option<EventBatch> {
        if self.launched {
            return None;
        }
        let mut events = vec![];
        while self.running.len() < self.max_num_seqs {
            let Some(next) = self.waiting.pop_front() else { break };
            self.stats.prompt_tokens += next.request.prompt.len() as u64;
            self.stats.prefix_queries += next.request.prompt.len() as u64;
            self.stats.prefix_hits += cached(&next.request) as u64;
            events.push((next.id, TokenEvent::Admitted { cached_tokens: cached(&next.request) }));
            self.running.push(next);
        }
        Some(events)
    }

    fn launch(&mut self) -> Result<(), EngineError> {
        self.launched = true;
        Ok(())
    }

    fn finish(&mut self) -> Result<EventBatch, EngineError> {
        self.launched = false;
        while self.control.hang.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut events = vec![];
        let mut at = 0;
        while at < self.running.len() {
            let handed_out = self.control.tokens.load(Ordering::SeqCst);
            if handed_out >= self.control.allowance.load(Ordering::SeqCst) {
                // Faults happen at the end of the allowance, so that tests know which tokens were sent before.
                if self.control.fail.swap(false, Ordering::SeqCst) {
                    let message = "the scripted step failed".to_owned();
                    return Err(EngineError { message, fatal: self.control.fatal.load(Ordering::SeqCst) });
                }
                assert!(!self.control.panic.load(Ordering::SeqCst), "the scripted panic");
                if self.control.fail_grammars.swap(false, Ordering::SeqCst) {
                    let error = || "no token may come next".to_owned();
                    events.extend(self.running.drain(..).map(|r| (r.id, TokenEvent::GrammarFailed { error: error() })));
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
                break;
            }
            self.control.tokens.fetch_add(1, Ordering::SeqCst);
            if self.step(at, &mut events) {
                self.running.remove(at);
            } else {
                at += 1;
            }
        }
        Ok(events)
    }

    fn abort_all(&mut self) -> Vec<RequestId> {
        self.launched = false;
        self.waiting.drain(..).chain(self.running.drain(..)).map(|r| r.id).collect()
    }

    fn reset_prefix_cache(&mut self) {
        self.control.resets.fetch_add(1, Ordering::SeqCst);
    }

    fn stats(&self) -> EngineStats {
        EngineStats {
            running: self.running.len(),
            waiting: self.waiting.len(),
            kv_blocks_free: self.stats.kv_blocks_total.saturating_sub(self.running.len()),
            ..self.stats
        }
    }
}
