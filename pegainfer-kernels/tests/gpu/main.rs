//! What needs a GPU and prints what it measures: collectives of several GPUs, mixtures of experts, adapters, vision towers,
//! packed rows, a GPU that stays open, and the GEMMs of DeepSeek-V4.
//!
//!     PEGAINFER_TEST_DEVICE=cuda cargo test --release -p pegainfer-kernels --features deepseek-v4 --test gpu
//!     PEGAINFER_TEST_DEVICE=cuda cargo test --release -p pegainfer-kernels --test gpu -- collectives
//!     PEGAINFER_TEST_DEVICE=cuda cargo test --release -p pegainfer-kernels --features deepseek-v4 --test gpu -- gemms routed
//!
//! The first argument names one of them: collectives, moe, lora, vision, pack, kept or gemms. After it, collectives take the
//! parts to run (exact, add_norm, failure, timing), moe the beginnings of layers' names, and the GEMMs names of weights
//! and numbers of tokens. Exits with 1 if anything fails.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test may panic, and this one reports")]

mod collectives;
#[cfg(feature = "deepseek-v4")]
mod deepseek_v4_gemms;
mod kept;
mod lora;
mod moe;
mod pack;
mod vision;

use pegainfer_core::exec::Exec;
use pegainfer_kernels::compare::Case;
use pegainfer_kernels::ops::HeadShape;
use std::time::Instant;

/// Replays that are timed.
const REPLAYS: usize = 10;
/// Not used by the ops of `moe`, `lora` and `vision`.
const CASE: Case =
    Case { shape: HeadShape { heads: 1, kv_heads: 1, head_dim: 64 }, context: 1, rope_theta: 1e6, exact_in_fp8: false };

fn main() {
    if std::env::var("PEGAINFER_TEST_DEVICE").as_deref() != Ok("cuda") {
        println!("skipped: these tests run on GPUs, with PEGAINFER_TEST_DEVICE=cuda");
        return;
    }
    // Options of the test harness, as in `cargo test -- --nocapture`, go to every test program.
    let mut words = std::env::args().skip(1).filter(|word| !word.starts_with("--"));
    let program = words.next();
    let words: Vec<String> = words.collect();
    let is_wanted = |name: &str| program.as_deref().is_none_or(|program| program == name);
    if is_wanted("collectives") {
        collectives::run(&words);
    }
    if is_wanted("moe") && !moe::run(&words) {
        std::process::exit(1);
    }
    if is_wanted("lora") && !lora::run() {
        std::process::exit(1);
    }
    if is_wanted("vision") && !vision::run() {
        std::process::exit(1);
    }
    if is_wanted("kept") && !kept::run() {
        std::process::exit(1);
    }
    if is_wanted("pack") && !pack::run() {
        std::process::exit(1);
    }
    #[cfg(feature = "deepseek-v4")]
    if is_wanted("gemms") && !deepseek_v4_gemms::run(&words) {
        std::process::exit(1);
    }
}

/// Seconds of the calls of `launch` in a graph.
fn seconds(gpu: &mut Exec, mut launch: impl FnMut(&mut Exec)) -> f64 {
    launch(gpu);
    gpu.begin_capture().unwrap();
    launch(gpu);
    let graph = gpu.end_capture().unwrap();
    gpu.replay(&graph).unwrap();
    gpu.synchronize().unwrap();
    let start = Instant::now();
    (0..REPLAYS).for_each(|_| gpu.replay(&graph).unwrap());
    gpu.synchronize().unwrap();
    start.elapsed().as_secs_f64() / REPLAYS as f64
}
