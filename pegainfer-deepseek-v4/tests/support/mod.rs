//! Code shared by the tests of the real engine: the checkpoint, its reference outputs, and the logits after a text.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

pub mod derived;
#[path = "../../../pegainfer-core/tests/engines/mod.rs"]
mod engines;

pub use engines::*;
use pegainfer_core::engine::GenerateRequest;
use pegainfer_deepseek_v4::numerics::Numerics;
use pegainfer_deepseek_v4::plan::{self, PAGE_TOKENS, SampleRow};
use pegainfer_deepseek_v4::sharing::Sharing;
use pegainfer_deepseek_v4::{DeepSeekEngine, DeepSeekV4, Options};
use pegainfer_runtime::{Overrides, load};
use std::path::PathBuf;

/// The checkpoint under test.
pub fn model_path() -> PathBuf {
    other_model().unwrap_or_else(|| bundled_model("dsv4-tiny-fp4fp8"))
}

/// Reference outputs of the checkpoint; see tests/fixtures/README.md.
pub fn fixture() -> Fixture {
    Fixture::under_test("dsv4-tiny")
}

/// Options of loading.
pub type LoadOptions = pegainfer_runtime::LoadOptions<Options>;

/// Defaults that leave every invariant to the test.
pub fn options(numerics: Numerics) -> LoadOptions {
    LoadOptions {
        model_path: model_path(),
        dummy_seed: None,
        cuda_graph: cuda_graph(),
        loop_back_ranks: None,
        check_ranks: false,
        model: Options { numerics, sharing: Sharing::OFFICIAL },
        overrides: Overrides::default(),
        max_model_len: Some(1024),
        max_num_seqs: Some(16),
        max_num_batched_tokens: Some(1024),
        max_num_mixed_tokens: 1024,
        kv_cache_bytes: small_cache(64 << 20),
        gpu_memory_utilization: 0.9,
        gpu_memory_limit: None,
        // As many snapshots as sequences, about.
        state_cache_bytes: Some(4 << 20),
        state_cache_interval: PAGE_TOKENS,
        kv_offloading_bytes: None,
        kv_disk: None,
        lora: None,
        speculation: None,
    }
}

/// KV cache of three pages, the third of which two requests of [`growing`] need.
pub const THREE_PAGES: Option<u64> = Some(3 * 83_000);

/// Two requests that grow to a second page each. The younger one is there first, and gives its page to the older one.
pub fn growing(text: &[u32]) -> [GenerateRequest; 2] {
    [(0, 110), (50, 124)].map(|(first, length)| greedy(&text[first..][..length], 60))
}

/// A loaded engine on `ranks` ranks: on the CPU with one thread each, or with `PEGAINFER_TEST_DEVICE=cuda` on one GPU
/// each.
pub fn engine(ranks: usize, options: &LoadOptions) -> DeepSeekEngine {
    load::<DeepSeekV4>(best().execs(ranks), options, &mut |_, _| {}).unwrap().engine
}

/// A loaded engine on one rank, with two threads on a CPU.
pub fn engine_with_threads(options: &LoadOptions) -> DeepSeekEngine {
    load::<DeepSeekV4>(vec![best().exec_with(2)], options, &mut |_, _| {}).unwrap().engine
}

/// Numbers of ranks that can share the bundled checkpoint.
pub const RANKS: &[usize] = &[2, 4];

/// Log-softmax of the logits after each of the last `count` tokens of `text`, computed in chunks of `chunk` tokens in
/// slot 0 and pages from 0 on.
pub fn logits(engine: &mut DeepSeekEngine, text: &[u32], chunk: usize, count: usize) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    let mut first = 0;
    while first < text.len() {
        // At most 16 samples per step, because logits are kept for only that many.
        let wanted = (text.len() - count).max(first);
        let mut end = (first + chunk).min(text.len());
        if end > wanted + 16 {
            end = wanted + 16;
        }
        let mut step = plan::uniform(1, end - first, end);
        step.tokens = text[first..end].to_vec();
        let sample = |position: usize| SampleRow { token: (position - first) as u32, ..step.samples[0].clone() };
        step.samples = (wanted..end).map(sample).collect();
        engine.executor().run(&step).unwrap();
        if !step.samples.is_empty() {
            let logits = engine.executor().logits(step.samples.len()).unwrap();
            rows.extend(logits.chunks(logits.len() / step.samples.len()).map(log_softmax));
        }
        first = end;
    }
    assert_eq!(rows.len(), count);
    rows
}

/// Log-softmax of one row of logits.
pub fn log_softmax(row: &[f32]) -> Vec<f32> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|v| f64::from(v - max).exp()).sum();
    row.iter().map(|v| (f64::from(v - max) - sum.ln()) as f32).collect()
}

/// The largest difference of two lists of rows.
pub fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
