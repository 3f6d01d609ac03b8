//! The real router with an engine that repeats its prompt, so that the input determines the model's output. If a
//! grammar forbids the prompt's token, the engine takes the first allowed one.

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use http_body_util::BodyExt;
use pegainfer_core::engine::{
    EngineConfig, EngineError, EngineHandle, EngineLimits, EngineStats, EventBatch, FinishReason, GenerateRequest,
    RequestId, StepEngine, TokenEvent, TokenLogprobs, TokenOut, Usage,
};
use pegainfer_core::grammar::GrammarTracker;
use pegainfer_models::args::TaskArg;
use pegainfer_server::app::{App, Options};
use pegainfer_server::text_service::Checkpoint;
use serde_json::Value;
use serde_json::value::RawValue;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;
use tokio::runtime::Runtime;
use tower::ServiceExt;

/// `<|im_end|>` of the bundled tokenizer.
const EOS: u32 = 4089;
const VOCABULARY: usize = 4096;
/// `<|image_pad|>` of the tokenizer of the test model that reads images, and the size of its vocabulary.
pub const IMAGE_TOKEN: u32 = 4097;
const IMAGE_VOCABULARY: usize = 4160;

struct Fixture {
    /// Of models that generate text, vectors and scores.
    routers: [Router; 3],
    /// The gRPC services of the first one.
    grpc: Router,
    /// A server whose model reads images.
    images: Router,
    runtime: Runtime,
}

/// The fixture, built once: a fuzzer calls its target millions of times.
fn fixture() -> &'static Fixture {
    static FIXTURE: OnceLock<Fixture> = OnceLock::new();
    FIXTURE.get_or_init(|| {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/qwen3-tiny");
        let apps = [TaskArg::Generate, TaskArg::Embed, TaskArg::Rerank].map(|task| {
            let checkpoint = Checkpoint::load_for(&dir, task).expect("the bundled checkpoint");
            let engine = EngineHandle::spawn(Echo::default(), EngineConfig::default()).expect("threads");
            App::new(engine, checkpoint, vec![], Options::default())
        });
        let checkpoint = Checkpoint::load(&dir.with_file_name("qwen35-vl-tiny")).expect("the checkpoint");
        let engine = Echo { image_token: Some(IMAGE_TOKEN), ..Echo::default() };
        let engine = EngineHandle::spawn(engine, EngineConfig::default()).expect("threads");
        let mut options = Options::default();
        options.limits.images.max_image_tokens = 128.try_into().expect("not 0");
        let images = App::new(engine, checkpoint, vec![], options).router();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        Fixture { routers: apps.each_ref().map(App::router), grpc: apps[0].grpc_router(), images, runtime }
    })
}

/// The body of a request that was answered. `None` if a field that is ignored has a number beyond f64, such as 1e999:
/// that is JSON, but no `Value` holds it. `shown` describes the request in the panic of a body that is no JSON.
pub fn read_accepted(body: &[u8], shown: &dyn Fn() -> String) -> Option<Value> {
    serde_json::from_slice::<&RawValue>(body).unwrap_or_else(|e| panic!("{e} was accepted: {}", shown()));
    serde_json::from_slice(body).ok()
}

/// Posts a body; returns the status and the response.
pub fn post(path: &str, body: &[u8]) -> (StatusCode, String) {
    let fixture = fixture();
    let router = match path {
        "/v1/embeddings" => &fixture.routers[1],
        "/v1/rerank" | "/v1/score" => &fixture.routers[2],
        _ => &fixture.routers[0],
    };
    post_to(router, path, body)
}

/// The same to a model that reads images.
pub fn post_image(path: &str, body: &[u8]) -> (StatusCode, String) {
    post_to(&fixture().images, path, body)
}

fn post_to(router: &Router, path: &str, body: &[u8]) -> (StatusCode, String) {
    let request = Request::post(path).header("host", "localhost").header("content-type", "application/json");
    let request = request.body(Body::from(body.to_vec()));
    fixture().runtime.block_on(async {
        let response = router.clone().oneshot(request.expect("a request")).await.expect("infallible");
        let status = response.status();
        assert!(![401, 403, 405, 415, 421].contains(&status.as_u16()), "{path} is not reached: {status}");
        let bytes = to_bytes(response.into_body(), usize::MAX).await.expect("a body");
        (status, String::from_utf8(bytes.into()).expect("UTF-8"))
    })
}

/// The answer to a gRPC call.
#[derive(Debug)]
pub struct Answer {
    /// gRPC's code.
    pub code: i32,
    /// The error's sentence, percent-encoded.
    pub error: String,
    /// The messages.
    pub messages: Vec<Vec<u8>>,
}

/// Calls a gRPC method with an encoded message.
pub fn call(path: &str, message: &[u8]) -> Answer {
    let fixture = fixture();
    let body = [&[0], &(message.len() as u32).to_be_bytes()[..], message].concat();
    let request = Request::post(path).header("host", "localhost").header("content-type", "application/grpc");
    let request = request.body(Body::from(body)).expect("a request");
    fixture.runtime.block_on(async {
        let response = fixture.grpc.clone().oneshot(request).await.expect("infallible");
        assert_eq!(response.status(), StatusCode::OK, "{path}");
        let (head, body) = response.into_parts();
        let body = body.collect().await.expect("a body");
        let trailers = body.trailers().cloned().unwrap_or(head.headers);
        let text = |name: &str| trailers.get(name).map(|value| value.to_str().expect("ASCII").to_owned());
        let (code, error) = (text("grpc-status").expect("a status"), text("grpc-message").unwrap_or_default());
        Answer { code: code.parse().expect("a number"), error, messages: messages(&body.to_bytes()) }
    })
}

/// The messages of a body.
fn messages(mut body: &[u8]) -> Vec<Vec<u8>> {
    let mut messages = Vec::new();
    while let Some((&[flags, a, b, c, d], rest)) = body.split_first_chunk::<5>() {
        assert_eq!(flags, 0);
        let (message, rest) = rest.split_at(u32::from_be_bytes([a, b, c, d]) as usize);
        messages.push(message.to_vec());
        body = rest;
    }
    assert!(body.is_empty(), "half a message");
    messages
}

/// Mock engine: generates the prompt again, then EOS.
#[derive(Default)]
struct Echo {
    requests: Vec<Sequence>,
    launched: bool,
    image_token: Option<u32>,
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
    if request.vector && *generated == 1 {
        events.push((id, TokenEvent::Vector(Box::new([0.5, -1.0, 0.25]))));
    }
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
            vocab_size: if self.image_token.is_some() { IMAGE_VOCABULARY } else { VOCABULARY },
            block_size: 16,
            kv_blocks: 64,
            kv_cache_dtype: "bf16",
            max_num_seqs: 1024,
            eos_token_ids: vec![EOS],
            num_speculative_tokens: None,
            image_token: self.image_token,
            unsupported: &["prompt_logprobs", "priority"],
            max_loras: 0,
            hidden_size: 3,
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
