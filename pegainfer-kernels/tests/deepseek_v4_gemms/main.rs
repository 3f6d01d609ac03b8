//! DeepSeek-V4's dense GEMMs and its experts at many tokens on a GPU: their difference from the CPU reference, and their time:
//!
//!     PEGAINFER_TEST_DEVICE=cuda cargo test --release -p pegainfer-kernels --features deepseek-v4 --test deepseek_v4_gemms
//!
//! Shapes are those of DeepSeek-V4-Flash on two and four ranks. With PEGAINFER_BLASLT=off the kernels of csrc/deepseek_v4_gemm.cu
//! run. Times are of a CUDA graph whose calls take weights in turn, 128 MB of them. Exits with 1 if anything differs too much.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test may panic, and this one reports")]

#[cfg(feature = "deepseek-v4")]
mod calls;
#[cfg(feature = "deepseek-v4")]
mod data;
#[cfg(feature = "deepseek-v4")]
mod routed;

#[cfg(feature = "deepseek-v4")]
fn main() {
    if std::env::var("PEGAINFER_TEST_DEVICE").as_deref() != Ok("cuda") {
        println!("skipped: these GEMMs run on a GPU, with PEGAINFER_TEST_DEVICE=cuda");
    } else if !calls::run() {
        std::process::exit(1);
    }
}

#[cfg(not(feature = "deepseek-v4"))]
fn main() {}
