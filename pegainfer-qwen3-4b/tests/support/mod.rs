//! The family under test, and what the tests of every family share.

#![allow(dead_code, reason = "each test binary uses its own part")]

#[path = "../../../pegainfer-runtime/tests/family/mod.rs"]
mod family;

pub use family::*;
use pegainfer_core::tensor::Tensor;
use pegainfer_qwen3_4b::config::Config;
pub use pegainfer_qwen3_4b::{Qwen3 as Family, Qwen3Engine as Engine};
use pegainfer_runtime::DecoderWorkspace;

/// Numbers of ranks that can share the bundled checkpoint.
pub const RANKS: &[usize] = &[2, 4];
/// Tested unless another checkpoint is named.
pub const BUNDLED: &str = "qwen3-tiny";
/// Memory for snapshots of states.
pub const STATE_CACHE: Option<u64> = None;
/// Memory for a few snapshots.
pub const SMALL_STATE_CACHE: Option<u64> = None;
/// Lengths of random prompts.
pub const LENGTHS: &[usize] = &[1, 2, 15, 16, 17, 31, 33, 48, 63, 100];
/// Tokens of the answer to a random prompt.
pub const GENERATED: usize = 20;
/// Blocks with which 32 requests are preempted.
pub const TIGHT_BLOCKS: u64 = 52;
/// Bytes of the KV cache with which 16 requests of [`mixes`] are preempted.
pub const MIXES_CACHE: u64 = 16 * 16 * 6144;
/// Steps of [`mixes`].
pub const MIXES_STEPS: u64 = 2_000;
/// Adapters with reference outputs, in tests/fixtures/lora.
pub const ADAPTERS: [&str; 3] = ["qv-r4", "rs-r8", "all-r16"];
/// Checkpoints with experts, in bf16 and in FP8.
pub const MOE: [&str; 2] = ["qwen3-moe-tiny", "qwen3-moe-tiny-fp8"];

/// Number of their layers, all of which have experts.
pub const EXPERT_LAYERS: usize = 3;

/// A model without the layers after the first `layers`.
pub fn first_layers(config: &Config, layers: usize) -> Config {
    Config { layers, ..config.clone() }
}

/// Experts and weights that the last of `layers` layers chose for `tokens` tokens.
pub fn chosen_by_layer(work: &mut DecoderWorkspace, layers: usize, tokens: usize) -> (&Tensor, &Tensor) {
    let mlp = &mut work.activations.mlp;
    (mlp.chosen.of_layer(layers - 1, tokens), &mlp.weights)
}
