//! What a plan of cuBLASLt is made for.

use pegainfer_core::tensor::DType;

/// What is multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Multiplied {
    /// bf16 by bf16.
    Bf16,
    /// The same, with the weight in the first half of the workspace.
    Widened,
    /// FP8 by FP8 with scales of blocks; the activations are in the first half of the workspace.
    Fp8,
}

/// `[m, n] = [m, k] [n, k]ᵀ` with this output, whose rows are `pitch` apart. `+ out` needs no other plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GemmSize {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub out: DType,
    pub pitch: usize,
    pub multiplied: Multiplied,
}

impl GemmSize {
    /// Whether candidates are timed: bf16 weights of a checkpoint, whose outputs are whole matrices.
    pub(super) fn is_tuned(&self) -> bool {
        self.multiplied == Multiplied::Bf16 && self.pitch == self.n
    }
}
