//! Shared by the tests of the real engine: the checkpoint, its reference outputs, and a driver without threads.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use pegainfer_core::engine::{
    FinishReason, GenerateRequest, RequestId, StepEngine, TokenEvent, TokenLogprobs, TokenOut, Usage,
};
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::sampling::SamplingParams;
use pegainfer_qwen3_4b::{Engine, LoadOptions, load};
use serde::Deserialize;
use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;

/// The checkpoint under test: `PEGAINFER_TEST_MODEL_PATH`, or the bundled one.
pub fn model_path() -> PathBuf {
    match std::env::var_os("PEGAINFER_TEST_MODEL_PATH") {
        Some(path) => path.into(),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/qwen3-tiny"),
    }
}

/// Reference outputs, see tests/fixtures/README.md.
#[derive(Deserialize)]
pub struct Fixture {
    pub cases: Vec<Case>,
    /// What an engine in bf16 may differ by; by default what the bundled model's may.
    #[serde(default)]
    pub limits: Limits,
}

/// Bounds of the difference from a reference in f32, nats.
#[derive(Clone, Copy, Deserialize)]
pub struct Limits {
    /// Between the reference's best two tokens, above which the engine must agree.
    pub margin: f64,
    /// Mean error of a log-probability among the reference's top five.
    pub mean: f64,
    /// Largest such error.
    pub max: f64,
    /// Share of the steps that may be within the margin.
    pub close: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { margin: 0.05, mean: 0.03, max: 0.30, close: 0.1 }
    }
}

/// One prompt and its greedy continuation in f32.
#[derive(Deserialize)]
pub struct Case {
    pub name: String,
    pub prompt_ids: Vec<u32>,
    pub greedy_ids: Vec<u32>,
    pub margins: Vec<f64>,
    pub top20: Vec<Top>,
}

/// The twenty most likely tokens at one position.
#[derive(Deserialize)]
pub struct Top {
    pub ids: Vec<u32>,
    pub logprobs: Vec<f64>,
}

/// The reference of the checkpoint under test: `fixture.json` beside the weights, or the bundled model's.
pub fn fixture() -> Fixture {
    let path = match std::env::var_os("PEGAINFER_TEST_MODEL_PATH") {
        Some(path) => PathBuf::from(path).join("fixture.json"),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/qwen3-tiny.json"),
    };
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap()
}

/// Defaults that leave every invariant to the test. `PEGAINFER_TEST_CUDA_GRAPH=false` launches every op of a step.
pub fn options() -> LoadOptions {
    LoadOptions {
        model_path: model_path(),
        dummy_seed: None,
        max_model_len: Some(1024),
        max_num_seqs: 32,
        max_num_batched_tokens: 1024,
        max_num_mixed_tokens: 512,
        cuda_graph: std::env::var("PEGAINFER_TEST_CUDA_GRAPH").as_deref() != Ok("false"),
        // The bundled model's is small, so that tests see it full; another one's is what it needs.
        kv_cache_bytes: std::env::var_os("PEGAINFER_TEST_MODEL_PATH").is_none().then_some(64 << 20),
        gpu_memory_utilization: 0.9,
    }
}

/// Where an engine under test runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    Cpu(Isa),
    Cuda,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu(isa) => write!(f, "{isa}"),
            Self::Cuda => f.write_str("cuda"),
        }
    }
}

/// Every instruction-set path of this machine, worst first; or its GPU with `PEGAINFER_TEST_DEVICE=cuda`.
pub fn targets() -> Vec<Target> {
    match std::env::var("PEGAINFER_TEST_DEVICE").as_deref() {
        Ok("cuda") => vec![Target::Cuda],
        Err(_) | Ok("cpu") => Isa::available().into_iter().map(Target::Cpu).collect(),
        Ok(other) => panic!("PEGAINFER_TEST_DEVICE={other}: expected cpu or cuda"),
    }
}

/// The fastest of [`targets`].
pub fn best() -> Target {
    *targets().last().unwrap()
}

/// A loaded engine.
pub fn engine(target: Target, options: &LoadOptions) -> Engine {
    let exec = match target {
        Target::Cpu(isa) => Exec::cpu(isa, Some(2)).unwrap(),
        Target::Cuda => Exec::cuda(0, None).unwrap(),
    };
    load(exec, options, &mut |_, _| {}).unwrap().engine
}

/// A greedy request.
pub fn greedy(prompt: &[u32], max_tokens: usize) -> GenerateRequest {
    GenerateRequest {
        prompt: prompt.to_vec(),
        max_tokens,
        sampling: SamplingParams::greedy(),
        rules: None,
        grammar: None,
        prompt_logprobs: None,
        priority: 0,
        stop_token_ids: vec![],
        ignore_eos: true,
        logprobs: Some(5),
        cache_salt: 0,
    }
}

/// What one request gave.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Output {
    pub prompt: Option<Vec<TokenLogprobs>>,
    pub tokens: Vec<TokenOut>,
    pub end: Option<(FinishReason, Usage)>,
}

impl Output {
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|t| t.id).collect()
    }
    /// Tokens and the bits of every log-probability: all that must not depend on scheduling.
    pub fn bits(&self) -> Vec<Vec<u32>> {
        let bits = |t: &TokenOut| {
            let logprobs = t.logprobs.iter().flat_map(|l| {
                let top = l.top.iter().flat_map(|(id, p)| [*id, p.to_bits()]);
                [l.logprob.to_bits(), l.rank].into_iter().chain(top)
            });
            std::iter::once(t.id).chain(logprobs).collect()
        };
        self.tokens.iter().map(bits).collect()
    }
}

/// Runs all requests, submitted at once, to their end.
pub fn run(engine: &mut Engine, requests: &[GenerateRequest]) -> Vec<Output> {
    let mut outputs: HashMap<RequestId, Output> = HashMap::new();
    for (i, request) in requests.iter().enumerate() {
        engine.limits().check(request).unwrap();
        outputs.insert(RequestId(i as u64), Output::default());
        engine.add(RequestId(i as u64), request.clone());
    }
    while engine.has_work() {
        let events = match engine.plan() {
            Some(admitted) => {
                engine.launch().unwrap();
                admitted
            }
            None => engine.finish().unwrap(),
        };
        for (id, event) in events {
            let output = outputs.get_mut(&id).unwrap();
            match event {
                TokenEvent::Admitted { .. } => {}
                TokenEvent::Prompt(reports) => output.prompt = Some(reports),
                TokenEvent::Token(token) => output.tokens.push(token),
                TokenEvent::Finished { reason, usage } => output.end = Some((reason, usage)),
                TokenEvent::Failed { error } => panic!("{id:?}: {error}"),
            }
        }
    }
    (0..requests.len()).map(|i| outputs.remove(&RequestId(i as u64)).unwrap()).collect()
}
