//! Weight matrices of all models, in the formats that checkpoints have them in.

use crate::choice::WeightFormat;
use crate::cpu::weights::{BLOCK, FP4_BLOCK, Grouped, Scales, Weights};
use crate::ops::check::Check;
use pegainfer_core::exec::Device;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_core::weights::grouped::GroupFormat;

/// A weight `[n, k]`, never dequantised in memory.
#[derive(Debug)]
pub enum Matrix {
    /// `[n, k]` bf16.
    Bf16(Tensor),
    /// FP8 with a scale for each block of 128 x 128: `w = e4m3 · scale`.
    Fp8 {
        /// `[n, k]` u8, e4m3, no code NaN.
        weight: Tensor,
        /// Scales of the blocks.
        scale: BlockScales,
    },
    /// FP4 with a scale for each 32 values of a row: `w = e2m1 · 2^(scale - 127)`.
    Fp4 {
        /// `[n, k / 2]` u8: two E2M1 codes, the even column in the low nibble.
        weight: Tensor,
        /// `[n, k / 32]` u8, E8M0.
        scale: Tensor,
    },
    /// 4-bit to 8-bit codes with a scale for each group of columns of a row, in the layout of
    /// [`grouped::format`](pegainfer_core::weights::grouped::format).
    Grouped {
        /// Meaning of codes and scales.
        format: GroupFormat,
        /// `[n, code_bytes(k)]` u8.
        codes: Tensor,
        /// `[n, scale_bytes(k)]` u8.
        scales: Tensor,
    },
    /// One or more matrices with the same `k`, none of them a stack, stacked along their rows. For rows in several
    /// formats, and for FP8 parts whose rows are not a multiple of 128, so that blocks start anew in each.
    Stacked(Vec<Matrix>),
}

/// Scales of an FP8 matrix, `[n / 128, k / 128]`, both rounded up.
#[derive(Debug)]
pub enum BlockScales {
    /// u8, E8M0: `2^(scale - 127)` (DeepSeek-V4).
    E8m0(Tensor),
    /// f32 (Qwen3, Qwen3.5).
    F32(Tensor),
}

impl BlockScales {
    /// The tensor of either format.
    pub fn tensor(&self) -> &Tensor {
        let (Self::E8m0(scales) | Self::F32(scales)) = self;
        scales
    }
}

/// A borrowed [`Matrix`], or a bf16 tensor as one; the argument type of ops.
#[derive(Debug, Clone, Copy)]
pub enum MatrixRef<'a> {
    /// Borrowed [`Matrix::Bf16`].
    Bf16(&'a Tensor),
    /// Borrowed [`Matrix::Fp8`]: codes and scales.
    Fp8(&'a Tensor, &'a BlockScales),
    /// Borrowed [`Matrix::Fp4`]: codes and scales.
    Fp4(&'a Tensor, &'a Tensor),
    /// Borrowed [`Matrix::Grouped`]: format, codes and scales.
    Grouped(GroupFormat, &'a Tensor, &'a Tensor),
    /// Borrowed [`Matrix::Stacked`].
    Stacked(&'a [Matrix]),
}

impl<'a> From<&'a Tensor> for MatrixRef<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self::Bf16(tensor)
    }
}

impl<'a> From<&'a mut Tensor> for MatrixRef<'a> {
    fn from(tensor: &'a mut Tensor) -> Self {
        Self::Bf16(tensor)
    }
}

impl<'a> From<&'a Matrix> for MatrixRef<'a> {
    fn from(matrix: &'a Matrix) -> Self {
        matrix.as_ref()
    }
}

impl Matrix {
    /// The matrix as ops take it.
    pub fn as_ref(&self) -> MatrixRef<'_> {
        match self {
            Self::Bf16(w) => MatrixRef::Bf16(w),
            Self::Fp8 { weight, scale } => MatrixRef::Fp8(weight, scale),
            Self::Fp4 { weight, scale } => MatrixRef::Fp4(weight, scale),
            Self::Grouped { format, codes, scales } => MatrixRef::Grouped(*format, codes, scales),
            Self::Stacked(parts) => MatrixRef::Stacked(parts),
        }
    }

    /// `(n, k)`.
    pub fn shape(&self) -> (usize, usize) {
        self.as_ref().shape()
    }

    /// True if any of its rows are not bf16.
    pub fn is_quantized(&self) -> bool {
        self.as_ref().is_quantized()
    }

    /// The values, row-major `[n, k]`; on the host only. With E8M0 scales every value is exact in bf16 unless its scale
    /// is below 2^-117.
    pub fn dequantize(&self) -> Vec<f32> {
        let one = |w: &Weights<'_>, k: usize| w.dequantize(w.rows(k), k);
        let k = self.shape().1;
        self.as_ref().weights().iter().flat_map(|w| one(w, k)).collect()
    }

    /// The tensors that hold it, for records.
    pub fn tensors(&self) -> Vec<&Tensor> {
        self.as_ref().tensors()
    }
}

/// The argument of DeepSeek-V4's ops: one matrix, no stack.
#[cfg(feature = "deepseek-v4")]
impl Matrix {
    /// The codes, and the device address of the scales, 0 without.
    pub(crate) fn device(&self) -> (&Tensor, u64) {
        match self {
            Self::Bf16(w) => (w, 0),
            Self::Fp8 { weight, scale } => (weight, scale.tensor().device()),
            Self::Fp4 { weight, scale } => (weight, scale.device()),
            Self::Grouped { codes, scales, .. } => (codes, scales.device()),
            Self::Stacked(parts) => parts[0].device(),
        }
    }

    /// The matrix in the form that the reference kernel takes.
    pub(super) fn weights(&self) -> Weights<'_> {
        self.as_ref().weights()[0]
    }
}

impl<'a> MatrixRef<'a> {
    /// `(n, k)`.
    pub fn shape(self) -> (usize, usize) {
        match self {
            Self::Bf16(w) | Self::Fp8(w, _) => w.rows_cols(),
            Self::Fp4(weight, _) => {
                let (n, pairs) = weight.rows_cols();
                (n, 2 * pairs)
            }
            Self::Grouped(format, codes, _) => {
                let (n, bytes) = codes.rows_cols();
                (n, bytes * 8 / format.bits())
            }
            Self::Stacked(parts) => {
                (parts.iter().map(|part| part.shape().0).sum(), parts.first().map_or(0, |part| part.shape().1))
            }
        }
    }

    /// True if any of its rows are not bf16. DeepSeek-V4's reference rounds activations to FP8 before such a GEMM.
    pub fn is_quantized(self) -> bool {
        match self {
            Self::Bf16(_) => false,
            Self::Fp8(..) | Self::Fp4(..) | Self::Grouped(..) => true,
            Self::Stacked(parts) => parts.iter().any(Matrix::is_quantized),
        }
    }

    /// The tensors that hold it, for records.
    pub fn tensors(self) -> Vec<&'a Tensor> {
        match self {
            Self::Bf16(w) => vec![w],
            Self::Fp8(weight, scale) => vec![weight, scale.tensor()],
            Self::Fp4(weight, scale) => vec![weight, scale],
            Self::Grouped(_, codes, scales) => vec![codes, scales],
            Self::Stacked(parts) => parts.iter().flat_map(Matrix::tensors).collect(),
        }
    }

    /// Operands of a record: `before`, its tensors, `after`.
    pub(super) fn reads<'b>(self, before: &[&'b Tensor], after: &[&'b Tensor]) -> Vec<&'b Tensor>
    where
        'a: 'b,
    {
        before.iter().copied().chain(self.tensors()).chain(after.iter().copied()).collect()
    }

    /// Bytes of all its tensors.
    pub fn bytes(self) -> u64 {
        self.tensors().iter().map(|tensor| tensor.bytes()).sum()
    }

    /// Dtypes and shapes fit each other.
    pub(super) fn check(self, check: Check) -> Result<(), OpError> {
        let (n, k) = self.shape();
        match self {
            Self::Bf16(w) => check.is(w, DType::Bf16, &[n, k]),
            Self::Fp8(weight, scale) => {
                let dtype = if matches!(scale, BlockScales::F32(_)) { DType::F32 } else { DType::U8 };
                check.is(weight, DType::U8, &[n, k])?;
                check.is(scale.tensor(), dtype, &[n.div_ceil(BLOCK), k.div_ceil(BLOCK)])
            }
            Self::Fp4(weight, scale) => {
                check.that(k.is_multiple_of(FP4_BLOCK), "k must be a multiple of 32")?;
                check.is(weight, DType::U8, &[n, k / 2])?;
                check.is(scale, DType::U8, &[n, k / FP4_BLOCK])
            }
            Self::Grouped(format, codes, scales) => {
                if let Err(error) = format.check(k) {
                    return Err(OpError { op: check.0, message: format!("{} {error}", codes.name()) });
                }
                check.is(codes, DType::U8, &[n, format.code_bytes(k)])?;
                check.is(scales, DType::U8, &[n, format.scale_bytes(k)])
            }
            Self::Stacked(parts) => {
                check.that(!parts.is_empty(), "w has no parts")?;
                parts.iter().try_for_each(|part| {
                    check.that(part.shape().1 == k, "parts of w differ in k")?;
                    check.that(!matches!(part, Matrix::Stacked(_)), "a part of w is a stack")?;
                    part.as_ref().check(check)
                })
            }
        }
    }

    /// Checks that a dense GEMM supports it: bf16, FP8 or group-quantised, of this shape; FP8 with f32 scales on a GPU.
    pub(super) fn check_dense(self, check: Check, device: Device, shape: (usize, usize)) -> Result<(), OpError> {
        let fp4 = |part: &Matrix| matches!(part, Matrix::Fp4 { .. });
        let has_fp4 = matches!(self, Self::Fp4(..)) || matches!(self, Self::Stacked(parts) if parts.iter().any(fp4));
        check.that(!has_fp4, "w is FP4, expected bf16, FP8 or groups")?;
        self.check(check)?;
        if self.shape() != shape {
            let names: Vec<&str> = self.tensors().iter().map(|tensor| tensor.name()).collect();
            let (names, found, expected) = (names.join(", "), self.shape(), shape);
            return Err(OpError { op: check.0, message: format!("{names} is {found:?}, expected {expected:?}") });
        }
        let e8m0 = |part: &Matrix| matches!(part, Matrix::Fp8 { scale: BlockScales::E8m0(_), .. });
        let has_e8m0 = matches!(self, Self::Fp8(_, BlockScales::E8m0(_)))
            || matches!(self, Self::Stacked(parts) if parts.iter().any(e8m0));
        check
            .that(device != Device::Cuda || !has_e8m0, "w has E8M0 scales, which a GPU takes in DeepSeek-V4's ops only")
    }

    /// The tensor of a bf16 matrix, else `None`.
    pub fn tensor(self) -> Option<&'a Tensor> {
        if let Self::Bf16(w) = self { Some(w) } else { None }
    }

    /// Format by which kernels are chosen.
    pub(crate) fn format(self) -> WeightFormat {
        match self {
            Self::Bf16(_) => WeightFormat::Bf16,
            Self::Fp8(..) | Self::Fp4(..) => WeightFormat::Fp8,
            Self::Grouped(format, ..) => WeightFormat::Grouped(format),
            Self::Stacked(_) => WeightFormat::Stacked,
        }
    }

    /// The matrices in the form that the reference kernels take, stacked rows in order.
    pub(super) fn weights(self) -> Vec<Weights<'a>> {
        match self {
            Self::Bf16(w) => vec![Weights::Bf16(w.host())],
            Self::Fp8(weight, BlockScales::E8m0(scale)) => {
                vec![Weights::Fp8(weight.host(), Scales::E8m0(scale.host()))]
            }
            Self::Fp8(weight, BlockScales::F32(scale)) => vec![Weights::Fp8(weight.host(), Scales::F32(scale.host()))],
            Self::Fp4(weight, scale) => vec![Weights::Fp4(weight.host(), scale.host())],
            Self::Grouped(format, codes, scales) => {
                vec![Weights::Grouped(Grouped { format, codes: codes.host(), scales: scales.host() })]
            }
            Self::Stacked(parts) => parts.iter().flat_map(|part| part.as_ref().weights()).collect(),
        }
    }
}
