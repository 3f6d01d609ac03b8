//! Shared by the tests of the engines, which include this file: reference outputs, where an engine runs, a driver without
//! threads, and the rule of what may differ.
//!
//! `PEGAINFER_TEST_MODEL_PATH` points the tests of an engine at another checkpoint with a fixture.json beside its weights;
//! `PEGAINFER_TEST_DEVICE=cuda` runs them on the GPU, with `PEGAINFER_TEST_CUDA_GRAPH=false` launch by launch.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use pegainfer_core::engine::{
    FinishReason, GenerateRequest, RequestId, StepEngine, TokenEvent, TokenLogprobs, TokenOut, Usage,
};
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::sampling::SamplingParams;
use pegainfer_core::schedule::{Engine, StepExecutor};
use serde::Deserialize;
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Another checkpoint to test than the bundled one.
pub fn other_model() -> Option<PathBuf> {
    std::env::var_os("PEGAINFER_TEST_MODEL_PATH").map(PathBuf::from)
}

/// Whether a GPU may replay graphs.
pub fn cuda_graph() -> bool {
    std::env::var("PEGAINFER_TEST_CUDA_GRAPH").as_deref() != Ok("false")
}

/// Reference outputs, see tests/fixtures/README.md.
#[derive(Deserialize)]
pub struct Fixture {
    pub cases: Vec<Case>,
    /// What an engine in bf16 may differ by; by default what the bundled model's may.
    #[serde(default)]
    pub limits: Limits,
}

impl Fixture {
    /// Reads a fixture.
    pub fn read(path: &Path) -> Self {
        let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        serde_json::from_str(&text).unwrap()
    }
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

impl Target {
    /// A device to load an engine on.
    pub fn exec(self) -> Exec {
        match self {
            Self::Cpu(isa) => Exec::cpu(isa, Some(2)).unwrap(),
            Self::Cuda => Exec::cuda(0, None).unwrap(),
        }
    }
}

/// The fastest of [`targets`].
pub fn best() -> Target {
    *targets().last().unwrap()
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
pub fn run(engine: &mut impl StepEngine, requests: &[GenerateRequest]) -> Vec<Output> {
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

/// Nats by which a log-probability may move on a GPU, from bf16 activations that round the other way.
pub const DRIFT: f32 = 0.25;

/// The same tokens and bits; on a GPU, where the order of sums depends on the batch, the same text up to a token that was
/// a close call, and log-probabilities up to there within [`DRIFT`].
pub fn same(what: &str, target: Target, expected: &[Output], got: &[Output]) {
    for (i, (expected, got)) in expected.iter().zip(got).enumerate() {
        if target == Target::Cuda {
            close(&format!("{what}: request {i}"), expected, got);
            continue;
        }
        assert!(expected.bits() == got.bits(), "{target}, {what}: request {i} gave\n{got:?}\nbut alone\n{expected:?}");
    }
}

/// The rule of a GPU. A sampled row may leave the text wherever its random number falls between two tokens.
fn close(what: &str, expected: &Output, got: &Output) {
    assert_eq!(expected.tokens.len(), got.tokens.len(), "{what}");
    for (i, (e, g)) in expected.tokens.iter().zip(&got.tokens).enumerate() {
        let (own, other) = (e.logprobs.as_ref().unwrap(), g.logprobs.as_ref().unwrap());
        if e.id != g.id {
            let greedy = own.rank == 1 && other.rank == 1;
            let gap = own.top[0].1 - own.top[1].1;
            assert!(!greedy || gap < DRIFT, "{what}, token {i}: {} instead of {}, {gap} nats apart", g.id, e.id);
            return;
        }
        let drift = (own.logprob - other.logprob).abs();
        assert!(drift <= DRIFT, "{what}, token {i}: the log-probability moved by {drift}");
    }
}

/// A step that fails: on the CPU its requests fail and the engine goes on; on a GPU a kernel that stops takes the context
/// with it, so no later step can succeed. To be run in a process of its own, because the context is lost for all of it.
pub fn fails_a_step<E: StepExecutor>(engine: &mut Engine<E>, target: Target) {
    engine.set_depth(2);
    let limits = engine.limits();
    // No vocabulary has this id; `EngineLimits::check` would refuse it.
    engine.add(RequestId(0), greedy(&[1, limits.vocab_size as u32, 2], 4));
    engine.add(RequestId(1), greedy(&[1, 2, 3], 4));
    let error = loop {
        let result = match engine.plan() {
            Some(_) => engine.launch(),
            None => engine.finish().map(drop),
        };
        if let Err(error) = result {
            break error;
        }
    };
    assert_eq!(error.fatal, target == Target::Cuda, "{error}");
    assert!(error.fatal || error.message.contains("vocabulary"), "{error}");
    assert_eq!(engine.abort_all(), [RequestId(0), RequestId(1)]);
    assert!(!engine.has_work());
    assert_eq!(engine.stats().kv_blocks_free, engine.stats().kv_blocks_total);
    if !error.fatal {
        assert_eq!(run(engine, &[greedy(&[1, 2, 3], 4)])[0].tokens.len(), 4);
    }
}
