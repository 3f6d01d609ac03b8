//! Reference kernels on the CPU ("twins" of the CUDA kernels): the oracle of every CUDA kernel, and the kernels that
//! serve without a GPU.

pub mod adjust;
pub mod attention;
pub mod causal_conv;
#[cfg(feature = "deepseek-v4")]
pub mod deepseek_v4;
mod disjoint;
pub mod formats;
pub mod gate;
pub mod gated_delta;
pub mod gated_norm;
pub mod gated_qkv;
pub mod isa;
pub mod kv_cache;
mod lanes;
pub mod linear;
pub mod lora;
pub mod moe;
pub mod norm;
pub mod penalties;
pub mod qkv;
pub mod rows;
pub mod sampling;
mod sigmoid;
pub mod swiglu;
pub mod vision;
pub mod weights;
