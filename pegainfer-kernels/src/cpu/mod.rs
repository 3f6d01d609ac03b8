//! CPU twins: the oracle for every CUDA kernel, and what serves when there is no GPU.

pub mod adjust;
pub mod attention;
#[cfg(feature = "deepseek-v4")]
pub mod deepseek_v4;
mod disjoint;
pub mod isa;
mod lanes;
pub mod linear;
pub mod norm;
pub mod qkv;
pub mod rows;
pub mod sampling;
pub mod swiglu;
