//! Reference kernels of `ops::deepseek_v4`: plain f32 loops in the order of the formulas. Only the GEMM is optimised;
//! the rest is the oracle of the GPU kernels.

pub mod attention;
pub mod batch;
pub mod compress;
pub mod dummy;
pub mod experts;
pub mod hyper;
pub mod index;
pub mod kv_quant;
pub mod matmul;
pub mod norm;
pub mod rope;
pub mod route;
