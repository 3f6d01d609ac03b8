//! DeepSeek-V4's dense GEMMs with many tokens: which of them run on cuBLASLt, and how.

use super::gemm::supports_fp8_cublaslt;
use super::gemm_shape::{GemmShape, Output, WeightFormat};
use super::gpu::{CublasLt, Gpu};
use crate::limits::fp8::{BLOCK, ROW_ALIGNMENT};

/// A GEMM of bf16 activations `[m, groups * k]` with a weight `[n, k]` for each group of `k` columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DenseShape {
    /// Tokens.
    pub m: usize,
    /// Rows of a group's weight.
    pub n: usize,
    /// Columns of a group's weight.
    pub k: usize,
    /// Groups of columns, each with its own weight; 1 for a plain GEMM.
    pub groups: usize,
    /// Rows of memory that the output has, at least `m`.
    pub out_rows: usize,
    /// Format of the weights: bf16, or FP8 with E8M0 scales.
    pub format: WeightFormat,
    /// True if the activations are values of `round_activation`.
    pub rounded: bool,
}

/// Method of such a GEMM on cuBLASLt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DenseGemm {
    /// FP8 by FP8: the activations' codes are packed in the workspace (csrc/deepseek_v4/pack.cu).
    Fp8CublasLt,
    /// FP8 weights, widened to bf16 in the workspace, by bf16.
    Widened,
    /// bf16 by bf16.
    CublasLt,
}

impl DenseGemm {
    /// Minimum number of tokens for cuBLASLt. In smaller steps the bits of a token must not depend on the other tokens,
    /// so csrc/deepseek_v4/skinny.cu or deepseek_v4_gemm.cu runs.
    pub const MIN_TOKENS: usize = 33;

    /// Minimum number of elements of a weight for cuBLASLt. Smaller weights gain little from it, and without it their
    /// GEMMs have the same bits for every number of tokens.
    pub const MIN_ELEMENTS: usize = 1 << 20;

    /// Minimum number of multiplications at which a smaller weight gains: 64 rows of 4,096 columns with 2,048 tokens.
    pub const MIN_MULTIPLICATIONS: usize = 1 << 29;

    /// Method of the GEMM on cuBLASLt; `None` if the kernels for few tokens run it.
    pub fn choose(gpu: &Gpu, shape: DenseShape) -> Option<Self> {
        let DenseShape { m, n, k, groups, .. } = shape;
        let elements = n * k * groups;
        if elements < Self::MIN_ELEMENTS && m * elements < Self::MIN_MULTIPLICATIONS {
            return None;
        }
        if m < Self::MIN_TOKENS || gpu.cublaslt == CublasLt::Missing || !n.is_multiple_of(8) || !k.is_multiple_of(8) {
            return None;
        }
        match shape.format {
            WeightFormat::Bf16 => Some(Self::CublasLt),
            WeightFormat::Fp8 if groups == 1 && shape.rounded && Self::is_fp8(gpu, shape) => Some(Self::Fp8CublasLt),
            WeightFormat::Fp8 => k.is_multiple_of(BLOCK).then_some(Self::Widened),
            WeightFormat::Grouped(_) | WeightFormat::Stacked => None,
        }
    }

    /// True if cuBLASLt can run the GEMM as FP8 by FP8. It takes multiples of four tokens, so up to three rows after
    /// the last one are written; the output must have memory for them.
    pub fn is_fp8(gpu: &Gpu, DenseShape { m, n, k, out_rows, .. }: DenseShape) -> bool {
        let shape = GemmShape { m, n, k, output: Output::Bf16, format: WeightFormat::Fp8 };
        m >= Self::MIN_TOKENS && m.next_multiple_of(ROW_ALIGNMENT) <= out_rows && supports_fp8_cublaslt(gpu, shape)
    }

    /// Name in records.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Fp8CublasLt => "cublaslt_fp8",
            Self::Widened => "widened",
            Self::CublasLt => "cublaslt",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: DenseShape =
        DenseShape { m: 1024, n: 1024, k: 4096, groups: 1, out_rows: 1024, format: WeightFormat::Fp8, rounded: true };

    #[test]
    fn tensor_cores_multiply_fp8_where_they_can() {
        let choose = |shape| DenseGemm::choose(&Gpu::PLANNED, shape);
        assert_eq!(choose(SHAPE), Some(DenseGemm::Fp8CublasLt));
        assert_eq!(choose(DenseShape { m: 1022, ..SHAPE }), Some(DenseGemm::Fp8CublasLt));
        let full = DenseShape { m: 1022, out_rows: 1022, ..SHAPE };
        assert_eq!(choose(full), Some(DenseGemm::Widened), "there is no memory after the last row");
        let unrounded = DenseShape { groups: 4, rounded: false, ..SHAPE };
        assert_eq!(choose(unrounded), Some(DenseGemm::Widened));
        assert_eq!(choose(DenseShape { n: 4096, k: 256, ..SHAPE }), Some(DenseGemm::Widened));
        let bf16 = DenseShape { n: 256, format: WeightFormat::Bf16, ..SHAPE };
        assert_eq!(choose(bf16), Some(DenseGemm::CublasLt));
        let a100 = Gpu::named("A100").unwrap();
        assert_eq!(DenseGemm::choose(&a100, SHAPE), Some(DenseGemm::Widened));
    }

    #[test]
    fn few_tokens_and_gpus_without_cublaslt_have_other_kernels() {
        assert_eq!(DenseGemm::choose(&Gpu::PLANNED, DenseShape { m: 32, ..SHAPE }), None);
        assert_eq!(DenseGemm::choose(&Gpu { cublaslt: CublasLt::Missing, ..Gpu::PLANNED }, SHAPE), None);
        assert_eq!(DenseGemm::choose(&Gpu::PLANNED, DenseShape { n: 60, ..SHAPE }), None);
    }
}
