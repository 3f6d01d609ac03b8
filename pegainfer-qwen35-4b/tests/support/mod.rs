//! The family under test, and what the tests of every family share.

#![allow(dead_code, reason = "each test binary uses its own part")]

#[path = "../../../pegainfer-runtime/tests/family/mod.rs"]
mod family;

pub use family::*;
use pegainfer_core::tensor::Tensor;
use pegainfer_qwen35_4b::config::Config;
use pegainfer_qwen35_4b::workspace::Workspace;
pub use pegainfer_qwen35_4b::{Qwen35 as Family, Qwen35Engine as Engine};

/// Numbers of ranks that can share the bundled checkpoint.
pub const RANKS: &[usize] = &[2];
/// Tested unless another checkpoint is named.
pub const BUNDLED: &str = "qwen35-tiny";
/// Memory for snapshots of states.
pub const STATE_CACHE: Option<u64> = Some(256 << 20);
/// Memory for a few snapshots.
pub const SMALL_STATE_CACHE: Option<u64> = Some(8_000_000);
/// Lengths of random prompts.
pub const LENGTHS: &[usize] = &[1, 2, 3, 4, 15, 16, 17, 33, 64, 65, 130];
/// Tokens of the answer to a random prompt.
pub const GENERATED: usize = 50;
/// Blocks with which 32 requests are preempted.
pub const TIGHT_BLOCKS: u64 = 50;
/// Bytes of the KV cache with which 16 requests of [`mixes`] are preempted.
pub const MIXES_CACHE: u64 = 14 * 16 * 3072;
/// Steps of [`mixes`].
pub const MIXES_STEPS: u64 = 2_000;
/// Adapters with reference outputs, in tests/fixtures/lora.
pub const ADAPTERS: [&str; 2] = ["hybrid-r8", "text-r16"];
/// Checkpoints with experts, in bf16 and in FP8.
pub const MOE: [&str; 2] = ["qwen35-moe-tiny", "qwen35-moe-tiny-fp8"];

/// Number of their layers, all of which have experts.
pub const EXPERT_LAYERS: usize = 4;

/// A model without the layers after the first `layers`.
pub fn first_layers(config: &Config, layers: usize) -> Config {
    Config { layers: config.layers[..layers].to_vec(), ..config.clone() }
}

/// Experts and weights that the last of `layers` layers chose for `tokens` tokens.
pub fn chosen_by_layer(work: &mut Workspace, layers: usize, tokens: usize) -> (&Tensor, &Tensor) {
    let mlp = &mut work.decoder.activations.mlp;
    (mlp.chosen.of_layer(layers - 1, tokens), &mlp.weights)
}
