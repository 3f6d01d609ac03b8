//! Shared by the tests of the real engine: the checkpoint, its reference outputs, and a driver without threads.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use pegainfer_core::engine::{FinishReason, GenerateRequest, RequestId, StepEngine, TokenEvent, TokenOut, Usage};
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::sampling::SamplingParams;
use pegainfer_deepseek_v4::numerics::Numerics;
use pegainfer_deepseek_v4::plan::{PAGE_TOKENS, SampleRow, Step};
use pegainfer_deepseek_v4::{Engine, LoadOptions, load};
use serde::Deserialize;
use std::collections::HashMap;
use std::path::PathBuf;

/// The bundled checkpoint.
pub fn model_path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/dsv4-tiny-fp4fp8")
}

/// Reference outputs, see tests/fixtures/README.md.
#[derive(Deserialize)]
pub struct Fixture {
    pub cases: Vec<Case>,
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

impl Case {
    /// Prompt and continuation.
    pub fn text(&self) -> Vec<u32> {
        [&self.prompt_ids[..], &self.greedy_ids].concat()
    }
}

pub fn fixture() -> Fixture {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/dsv4-tiny.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Defaults that leave every invariant to the test.
pub fn options(numerics: Numerics) -> LoadOptions {
    LoadOptions {
        model_path: model_path(),
        max_model_len: Some(1024),
        max_num_seqs: 16,
        max_num_batched_tokens: 1024,
        kv_cache_bytes: Some(64 << 20),
        numerics,
    }
}

/// A loaded engine on `ranks` ranks.
pub fn engine(ranks: usize, options: &LoadOptions) -> Engine {
    let threads = if ranks == 1 { 2 } else { 1 };
    let execs = (0..ranks).map(|_| Exec::cpu(Isa::best(), Some(threads)).unwrap()).collect();
    load(execs, options, &mut |_, _| {}).unwrap().engine
}

/// Log-softmax of the logits behind each of the last `count` tokens of `text`, computed in chunks of `chunk` tokens in
/// slot 0 and pages from 0 on.
pub fn logits(engine: &mut Engine, text: &[u32], chunk: usize, count: usize) -> Vec<Vec<f32>> {
    let pages: Vec<u32> = (0..text.len().div_ceil(PAGE_TOKENS) as u32).collect();
    let mut rows = Vec::new();
    let mut first = 0;
    while first < text.len() {
        // At most 16 samples a step: the logits of so many are kept.
        let wanted = (text.len() - count).max(first);
        let mut end = (first + chunk).min(text.len());
        if end > wanted + 16 {
            end = wanted + 16;
        }
        let mut step = Step { qo_indptr: vec![0], max_pages: pages.len(), ..Step::default() };
        step.push(RequestId(0), &text[first..end], first, 0, &pages);
        for position in wanted..end {
            let (token, params) = ((position - first) as u32, SamplingParams::greedy());
            let row = SampleRow { id: RequestId(0), token, position: 0, adjustment: None, params, logprobs: None };
            step.samples.push(row);
        }
        engine.executor().run(&step).unwrap();
        if !step.samples.is_empty() {
            let logits = engine.executor().logits();
            rows.extend(logits.host::<f32>().chunks(logits.shape()[1]).map(log_softmax));
        }
        first = end;
    }
    assert_eq!(rows.len(), count);
    rows
}

fn log_softmax(row: &[f32]) -> Vec<f32> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|v| f64::from(v - max).exp()).sum();
    row.iter().map(|v| (f64::from(v - max) - sum.ln()) as f32).collect()
}

/// The largest difference of two lists of rows.
pub fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
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
                TokenEvent::Admitted { .. } | TokenEvent::Prompt(_) => {}
                TokenEvent::Token(token) => output.tokens.push(token),
                TokenEvent::Finished { reason, usage } => output.end = Some((reason, usage)),
                TokenEvent::Failed { error } => panic!("{id:?}: {error}"),
            }
        }
    }
    (0..requests.len()).map(|i| outputs.remove(&RequestId(i as u64)).unwrap()).collect()
}
