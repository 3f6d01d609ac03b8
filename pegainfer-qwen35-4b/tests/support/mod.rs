//! Shared by the tests of the real engine: the checkpoint and its reference outputs.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../../pegainfer-core/tests/engines/mod.rs"]
mod engines;

pub use engines::*;
use pegainfer_qwen35_4b::Qwen35Engine;
use pegainfer_runtime::{LoadOptions, Overrides, load};
use std::path::PathBuf;

/// Tested unless another checkpoint is named.
const BUNDLED: &str = "qwen35-tiny";

/// The checkpoint under test.
pub fn model_path() -> PathBuf {
    other_model().unwrap_or_else(|| bundled_model(BUNDLED))
}

/// Reference outputs of the checkpoint; see tests/fixtures/README.md.
pub fn fixture() -> Fixture {
    Fixture::under_test(BUNDLED)
}

/// Defaults that leave every invariant to the test.
pub fn options() -> LoadOptions {
    LoadOptions {
        model_path: model_path(),
        overrides: Overrides::default(),
        dummy_seed: None,
        max_model_len: Some(1024),
        max_num_seqs: Some(32),
        max_num_batched_tokens: Some(1024),
        max_num_mixed_tokens: 512,
        cuda_graph: cuda_graph(),
        speculation: None,
        kv_cache_bytes: small_cache(64 << 20),
        gpu_memory_utilization: 0.9,
        gpu_memory_limit: None,
        state_cache_bytes: small_cache(256 << 20),
        state_cache_interval: 64,
    }
}

/// A loaded engine.
pub fn engine(target: Target, options: &LoadOptions) -> Qwen35Engine {
    load(target.exec(), options, &mut |_, _| {}).unwrap().engine
}
