//! DeepSeek-V4's dense GEMMs and its experts at many tokens on a GPU: their difference from the CPU reference, and their time.
//!
//! Shapes are those of DeepSeek-V4-Flash on two and four ranks. With PEGAINFER_BLASLT=off the kernels of csrc/deepseek_v4/gemm.cu
//! run. Times are of a CUDA graph whose calls take weights in turn, 128 MB of them.

mod calls;
mod data;
mod routed;

pub use calls::run;
