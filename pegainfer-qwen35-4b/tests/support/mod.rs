//! The family under test, and what the tests of every family share.

#![allow(dead_code, reason = "each test binary uses its own part")]

#[path = "../../../pegainfer-runtime/tests/family/mod.rs"]
mod family;

pub use family::*;
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
