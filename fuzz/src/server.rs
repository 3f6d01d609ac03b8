//! The real router with an engine that repeats its prompt, so that the input determines the model's output. If a
//! grammar forbids the prompt's token, the engine takes the first allowed one.

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use pegainfer_core::engine::{
    EngineConfig, EngineError, EngineHandle, EngineLimits, EngineStats, EventBatch, FinishReason, GenerateRequest,
    RequestId, StepEngine, TokenEvent, TokenLogprobs, TokenOut, Usage,
};
use pegainfer_core::grammar::GrammarTracker;
use pegainfer_server::app::{App, Options};
use pegainfer_server::text_service::Checkpoint;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;
use tokio::runtime::Runtime;
use tower::ServiceExt;

/// `<|im_end|>` of the bundled tokenizer.
const EOS: u32 = 4089;
const VOCABULARY: usize = 4096;

struct Fixture {
    router: Router,
    runtime: Runtime,
}

/// The fixture, built once: a fuzzer calls its target millions of times.
fn fixture() -> &'static Fixture {
    static FIXTURE: OnceLock<Fixture> = OnceLock::new();
    FIXTURE.get_or_init(|| {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/qwen3-tiny");
        let checkpoint = Checkpoint::load(&dir).expect("the bundled checkpoint");
        let engine = EngineHandle::spawn(Echo::default(), EngineConfig::default()).expect("threads");
        let router = App::new(engine, checkpoint, vec![], Options::default()).router();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        Fixture { router, runtime }
    })
}

/// Posts a body; returns the status and the response.
pub fn post(path: &str, body: &[u8]) -> (StatusCode, String) {
    let fixture = fixture();
    let request = Request::post(path).header("host", "localhost").header("content-type", "application/json");
    let request = request.body(Body::from(body.to_vec()));
    fixture.runtime.block_on(async {
        let response = fixture.router.clone().oneshot(request.expect("a request")).await.expect("infallible");
        let status = response.status();
        assert!(![401, 403, 405, 415, 421].contains(&status.as_u16()), "{path} is not reached: {status}");
        let bytes = to_bytes(response.into_body(), usize::MAX).await.expect("a body");
        (status, String::from_utf8(bytes.into()).expect("UTF-8"))
    })
}

/// Mock engine: generates the prompt again, then EOS.
#[derive(Default)]
struct Echo {
    requests: Vec<Sequence>,
    launched: bool,
}

struct Sequence {
    id: RequestId,
    request: GenerateRequest,
    grammar: Option<GrammarTracker>,
    generated: usize,
}

/// The prompt's next token, or the first one that the grammar allows.
fn next_token(sequence: &mut Sequence) -> Result<u32, String> {
    let wanted = sequence.request.prompt.get(sequence.generated).copied().unwrap_or(EOS);
    let Some(grammar) = &mut sequence.grammar else { return Ok(wanted) };
    let mask = loop {
        match (grammar.failure(), grammar.mask()) {
            (Some(error), _) => return Err(error),
            (None, Some(mask)) => break mask,
            (None, None) => grammar.wait(Duration::from_secs(1)),
        }
    };
    let allowed = |id: &u32| mask.words()[*id as usize / 32] >> (id % 32) & 1 == 1;
    let token = [wanted, EOS].into_iter().chain(0..VOCABULARY as u32).find(allowed).ok_or("an empty mask")?;
    grammar.push(token);
    Ok(token)
}

/// Generates one token; true at the end.
fn step(sequence: &mut Sequence, events: &mut EventBatch) -> bool {
    let token = next_token(sequence);
    let Sequence { id, request, generated, .. } = sequence;
    let id = *id;
    let token = match token {
        Ok(token) => token,
        Err(error) => {
            events.push((id, TokenEvent::GrammarFailed { error }));
            return true;
        }
    };
    *generated += 1;
    let is_stop = request.stop_token_ids.contains(&token) || (token == EOS && !request.ignore_eos);
    let top = |n| (0..n as u32).map(|i| ((token + i) % VOCABULARY as u32, -1.0 - i as f32)).collect();
    let logprobs = request.logprobs.map(|n| Box::new(TokenLogprobs { logprob: -1.0, rank: 1, top: top(n) }));
    events.push((id, TokenEvent::Token(TokenOut { id: token, is_stop, drafted: false, logprobs })));
    let reason = match (is_stop, *generated == request.max_tokens) {
        (true, _) => FinishReason::Stop(token),
        (false, true) => FinishReason::Length,
        (false, false) => return false,
    };
    let usage = Usage { prompt_tokens: request.prompt.len(), completion_tokens: *generated, cached_tokens: 0 };
    events.push((id, TokenEvent::Finished { reason, usage }));
    true
}

impl StepEngine for Echo {
    fn limits(&self) -> EngineLimits {
        EngineLimits {
            max_model_len: 512,
            vocab_size: VOCABULARY,
            block_size: 16,
            kv_blocks: 64,
            kv_cache_dtype: "bf16",
            max_num_seqs: 1024,
            eos_token_ids: vec![EOS],
            num_speculative_tokens: None,
            unsupported: &["prompt_logprobs", "priority"],
        }
    }

    fn add(&mut self, id: RequestId, request: GenerateRequest) {
        let grammar = request.grammar.as_deref().map(GrammarTracker::new);
        self.requests.push(Sequence { id, request, grammar, generated: 0 });
    }

    fn cancel(&mut self, id: RequestId) {
        self.requests.retain(|sequence| sequence.id != id);
    }

    fn has_work(&self) -> bool {
        self.launched || !self.requests.is_empty()
    }

    fn plan(&mut self) -> Option<EventBatch> {
        let new = self.requests.iter().filter(|sequence| sequence.generated == 0);
        (!self.launched).then(|| new.map(|new| (new.id, TokenEvent::Admitted { cached_tokens: 0 })).collect())
    }

    fn launch(&mut self) -> Result<(), EngineError> {
        self.launched = true;
        Ok(())
    }

    fn finish(&mut self) -> Result<EventBatch, EngineError> {
        self.launched = false;
        let mut events = EventBatch::new();
        self.requests.retain_mut(|sequence| !step(sequence, &mut events));
        Ok(events)
    }

    fn abort_all(&mut self) -> Vec<RequestId> {
        self.launched = false;
        self.requests.drain(..).map(|sequence| sequence.id).collect()
    }

    fn reset_prefix_cache(&mut self) {}

    fn stats(&self) -> EngineStats {
        EngineStats { running: self.requests.len(), ..EngineStats::default() }
    }
}
