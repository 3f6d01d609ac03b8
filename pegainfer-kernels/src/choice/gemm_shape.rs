//! What a GEMM asks of a kernel.

/// What the kernels that read each weight once do with the sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Write them, rounded to bf16.
    Bf16,
    /// Write them as f32.
    F32,
    /// Write those of each split of the columns as f32, for a reader that adds them: a matrix with few rows fills the GPU.
    SplitK,
    /// Gate one half of them with the other: SwiGLU.
    Gated,
}

/// How the weight of a GEMM is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightFormat {
    /// bf16.
    Bf16,
    /// e4m3 with an f32 scale for each block of 128 x 128.
    Fp8,
    /// Rows of several formats, or blocks that begin anew: see [`Matrix::Stacked`](crate::ops::Matrix::Stacked).
    Stacked,
}

/// `[m, n] = [m, k] [n, k]ᵀ`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemmShape {
    /// Rows of x: tokens.
    pub m: usize,
    /// Rows of the weight: output features; gated, those of both halves.
    pub n: usize,
    /// Columns of both.
    pub k: usize,
    /// Epilogue.
    pub output: Output,
    /// Of the weight.
    pub format: WeightFormat,
}
