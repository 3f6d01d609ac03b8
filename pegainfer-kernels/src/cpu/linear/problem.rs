//! The operands of one call.

use super::output::Sink;
use half::bf16;

/// One GEMM: `out = x * w^T`.
pub(super) struct Problem<'a> {
    /// `[m, k]` row-major.
    pub x: &'a [bf16],
    /// `[n, k]` row-major.
    pub w: &'a [bf16],
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// `[m, n]` row-major.
    pub sink: Sink,
}
