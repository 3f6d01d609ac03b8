//! What a plan of cuBLASLt is made for.

use pegainfer_core::tensor::DType;

/// `[m, n] = [m, k] [n, k]ᵀ` of bf16, with this output. `+ out` needs no other plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct GemmSize {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub out: DType,
}
