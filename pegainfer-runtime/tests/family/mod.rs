//! Shared by the tests of the families that run on this crate, which include this folder: the checkpoint, its reference outputs,
//! and the tests that are the same for every family. The `support` module that includes this file names the family, its bundled
//! checkpoint and the sizes that suit it.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../../pegainfer-core/tests/engines/mod.rs"]
mod engines;

use super::{BUNDLED, Engine, Family, GENERATED, LENGTHS, STATE_CACHE};
pub use engines::*;
use pegainfer_core::engine::GenerateRequest;
use pegainfer_runtime::{LoadOptions, Overrides, load};
use std::path::PathBuf;

/// The checkpoint under test.
pub fn model_path() -> PathBuf {
    other_model().unwrap_or_else(|| bundled_model(BUNDLED))
}

/// Its reference outputs, see tests/fixtures/README.md of the family.
pub fn fixture() -> Fixture {
    Fixture::under_test(BUNDLED)
}

/// Requests of the fixture, and random prompts of awkward lengths.
pub fn requests() -> Vec<GenerateRequest> {
    invariance::requests(&fixture().cases, LENGTHS, GENERATED)
}

/// Defaults that leave every invariant to the test.
pub fn options() -> LoadOptions {
    LoadOptions {
        model: (),
        model_path: model_path(),
        overrides: Overrides::default(),
        dummy_seed: None,
        max_model_len: Some(1024),
        max_num_seqs: Some(32),
        max_num_batched_tokens: Some(1024),
        max_num_mixed_tokens: 512,
        cuda_graph: cuda_graph(),
        lora: None,
        speculation: None,
        kv_cache_bytes: small_cache(64 << 20),
        gpu_memory_utilization: 0.9,
        gpu_memory_limit: None,
        loop_back_ranks: None,
        check_ranks: false,
        state_cache_bytes: STATE_CACHE.and_then(small_cache),
        state_cache_interval: 64,
        kv_offloading_bytes: None,
        kv_disk: None,
    }
}

/// A loaded engine.
pub fn engine(target: Target, options: &LoadOptions) -> Engine {
    engine_on(1, target, options)
}

/// A loaded engine on `ranks` ranks: on the CPU, or one GPU each.
pub fn engine_on(ranks: usize, target: Target, options: &LoadOptions) -> Engine {
    load::<Family>(target.execs(ranks), options, &mut |_, _| {}).unwrap().engine
}
