//! The operands of one call.

use super::output::Sink;
use crate::cpu::weights::{BLOCK, Scales};
use half::bf16;

/// One GEMM: `out = x * w^T`, with weights `W`.
pub(super) struct Problem<'a, W = &'a [bf16]> {
    /// `[m, k]` row-major.
    pub x: &'a [bf16],
    /// `[n, k]` row-major.
    pub w: W,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// `[m, stride]` row-major, the first `n` columns.
    pub sink: Sink,
    /// Elements from one row of the output to the next.
    pub stride: usize,
}

/// FP8 weights: e4m3 codes `[n, k]`, a scale for each block of 128 x 128.
///
/// Every path widens codes to bf16, which is exact, sums the products of a block of 128 along `k` as for bf16 weights,
/// multiplies the sum by the block's scale, and adds it to the sum of the previous blocks.
#[derive(Clone, Copy)]
pub(super) struct Fp8<'a> {
    pub codes: &'a [u8],
    pub scales: Scales<'a>,
}

impl Fp8<'_> {
    /// Scale of block `block` of row `row`.
    pub fn scale(&self, row: usize, block: usize, k: usize) -> f32 {
        self.scales.get(row / BLOCK * k.div_ceil(BLOCK) + block)
    }
}
