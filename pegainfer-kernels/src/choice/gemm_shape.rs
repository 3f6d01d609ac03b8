//! Shape and operands of a GEMM, as kernels are chosen by them.

use pegainfer_core::weights::grouped::GroupFormat;

/// Use of the sums in kernels that read each weight once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Write them, rounded to bf16.
    Bf16,
    /// Write them as f32.
    F32,
    /// Write the sums of each split of the columns as f32, for a reader that adds them; fills the GPU for a matrix with
    /// few rows.
    SplitK,
    /// Gate one half of the sums with the other: SwiGLU.
    Gated,
}

/// Storage format of the weight of a GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightFormat {
    /// bf16.
    Bf16,
    /// e4m3 with an f32 scale for each block of 128 x 128.
    Fp8,
    /// Codes and scales of groups of columns: see [`Matrix::Grouped`](crate::ops::Matrix::Grouped).
    Grouped(GroupFormat),
    /// Rows of several formats, or blocks that begin anew: see [`Matrix::Stacked`](crate::ops::Matrix::Stacked).
    Stacked,
}

/// `[m, n] = [m, k] [n, k]ᵀ`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemmShape {
    /// Rows of x: tokens.
    pub m: usize,
    /// Rows of the weight, that is, output features; with gating, those of both halves.
    pub n: usize,
    /// Columns of both.
    pub k: usize,
    /// Epilogue.
    pub output: Output,
    /// Format of the weight.
    pub format: WeightFormat,
}
