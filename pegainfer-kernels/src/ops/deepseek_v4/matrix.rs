//! A weight matrix in the format that the checkpoint has it in.

use crate::cpu::deepseek_v4::matmul::{BLOCK, FP4_BLOCK, Weights};
use crate::ops::check::Check;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// A weight `[n, k]`, never dequantised in memory.
#[derive(Debug)]
pub enum Matrix {
    /// `[n, k]` bf16.
    Bf16(Tensor),
    /// FP8 with a scale for each block of 128 x 128: `w = e4m3 · 2^(scale - 127)`.
    Fp8 {
        /// `[n, k]` u8, e4m3.
        weight: Tensor,
        /// `[n / 128, k / 128]`, both rounded up, u8, E8M0.
        scale: Tensor,
    },
    /// FP4 with a scale for each 32 values of a row: `w = e2m1 · 2^(scale - 127)`.
    Fp4 {
        /// `[n, k / 2]` u8: two E2M1 codes, the even column in the low nibble.
        weight: Tensor,
        /// `[n, k / 32]` u8, E8M0.
        scale: Tensor,
    },
}

impl Matrix {
    /// `(n, k)`.
    pub fn shape(&self) -> (usize, usize) {
        match self {
            Self::Bf16(w) | Self::Fp8 { weight: w, .. } => w.rows_cols(),
            Self::Fp4 { weight, .. } => {
                let (n, pairs) = weight.rows_cols();
                (n, 2 * pairs)
            }
        }
    }

    /// True where the reference rounds activations to FP8 before the GEMM.
    pub fn is_quantized(&self) -> bool {
        !matches!(self, Self::Bf16(_))
    }

    /// The values, row-major `[n, k]`; on the host only. Every FP8 and FP4 value is exact in bf16 unless its scale is
    /// below 2^-117.
    pub fn dequantize(&self) -> Vec<f32> {
        let (n, k) = self.shape();
        self.weights().dequantize(n, k)
    }

    /// The tensors that hold it, for records.
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        match self {
            Self::Bf16(w) => vec![w],
            Self::Fp8 { weight, scale } | Self::Fp4 { weight, scale } => vec![weight, scale],
        }
    }

    /// Dtypes and shapes fit each other.
    pub(super) fn check(&self, check: Check) -> Result<(), OpError> {
        let (n, k) = self.shape();
        match self {
            Self::Bf16(w) => {
                check.that(k.is_multiple_of(FP4_BLOCK), "k must be a multiple of 32")?;
                check.is(w, DType::Bf16, &[n, k])
            }
            Self::Fp8 { weight, scale } => {
                check.that(k.is_multiple_of(BLOCK), "k must be a multiple of 128")?;
                check.is(weight, DType::U8, &[n, k])?;
                check.is(scale, DType::U8, &[n.div_ceil(BLOCK), k / BLOCK])
            }
            Self::Fp4 { weight, scale } => {
                check.that(k.is_multiple_of(BLOCK), "k must be a multiple of 128")?;
                check.is(weight, DType::U8, &[n, k / 2])?;
                check.is(scale, DType::U8, &[n, k / FP4_BLOCK])
            }
        }
    }

    /// The codes, and the device address of the scales, 0 without.
    pub(crate) fn device(&self) -> (&Tensor, u64) {
        match self {
            Self::Bf16(w) => (w, 0),
            Self::Fp8 { weight, scale } | Self::Fp4 { weight, scale } => (weight, scale.device()),
        }
    }

    /// As the reference kernel takes it.
    pub(super) fn weights(&self) -> Weights<'_> {
        match self {
            Self::Bf16(w) => Weights::Bf16(w.host()),
            Self::Fp8 { weight, scale } => Weights::Fp8(weight.host(), scale.host()),
            Self::Fp4 { weight, scale } => Weights::Fp4(weight.host(), scale.host()),
        }
    }
}
