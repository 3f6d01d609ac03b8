//! Key of a cuBLASLt plan.

use pegainfer_core::cuda::WORKSPACE_BYTES;
use pegainfer_core::tensor::DType;

/// The half of the workspace that the library leaves alone unless it multiplies bf16 tensors.
pub const FREE_BYTES: usize = WORKSPACE_BYTES / 2;
/// Part of the workspace that it leaves alone if weights in FP8 have scales of groups: it needs at most 15 MB then.
pub const FREE_BYTES_BY_GROUP: usize = WORKSPACE_BYTES - (16 << 20);

/// Bytes at the beginning of the workspace that GEMMs leave alone, by [`Multiplied::free_index`].
pub(super) const FREE: [usize; 3] = [0, FREE_BYTES, FREE_BYTES_BY_GROUP];

/// Types of the operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Multiplied {
    /// bf16 by bf16.
    Bf16,
    /// bf16 by bf16 by the heuristic's first algorithm. The library leaves the first half of the workspace alone: it
    /// may hold the weight, widened.
    Widened,
    /// FP8 by FP8: w has a scale for each block of 128 x 128, x for each 128 columns of a row. Rounded activations may
    /// be in the first half of the workspace.
    Fp8,
    /// FP8 by FP8: w also has a scale for each 128 columns of a row. It is in the first part of the workspace, and
    /// rounded activations may be.
    Fp8ByGroup,
}

impl Multiplied {
    /// True for operands in FP8.
    #[cfg(feature = "deepseek-v4")]
    fn is_fp8(self) -> bool {
        matches!(self, Self::Fp8 | Self::Fp8ByGroup)
    }

    /// Bytes of the workspace, from its beginning on, that the library leaves alone.
    pub(super) fn free_bytes(self) -> usize {
        FREE[self.free_index()]
    }

    /// Index of these bytes in [`FREE`].
    pub(super) fn free_index(self) -> usize {
        match self {
            Self::Bf16 => 0,
            Self::Widened | Self::Fp8 => 1,
            Self::Fp8ByGroup => 2,
        }
    }
}

/// `[m, n] = [m, k] [n, k]ᵀ` with this output. Accumulating uses the same plan.
///
/// With `groups` GEMMs in one call, each next one has the next `k` columns of x, `n` rows of w and `n` columns of the
/// output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GemmSize {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub out: DType,
    /// Elements from one row of the output to the next.
    pub pitch: usize,
    /// Elements from one row of x to the next.
    pub x_pitch: usize,
    pub groups: usize,
    pub multiplied: Multiplied,
}

impl GemmSize {
    /// A single GEMM of contiguous rows.
    pub fn whole((m, n, k): (usize, usize, usize), out: DType, multiplied: Multiplied) -> Self {
        Self { m, n, k, out, pitch: n, x_pitch: k, groups: 1, multiplied }
    }

    /// Bytes of its largest matrix, the output included.
    #[cfg(feature = "deepseek-v4")]
    pub(super) fn extent(&self) -> usize {
        let operand = if self.multiplied.is_fp8() { 1 } else { DType::Bf16.size() };
        let Self { m, n, k, .. } = *self;
        (m * self.pitch * self.out.size()).max(m * self.x_pitch * operand).max(self.groups * n * k * operand)
    }

    /// True if candidates are timed: bf16 weights of a checkpoint with whole matrices as outputs.
    pub(super) fn is_tuned(&self) -> bool {
        self.multiplied == Multiplied::Bf16 && self.pitch == self.n
    }
}
