//! GEMMs with a weight of the checkpoint: the kernel and its grid, alone and fused with the next op.

use super::gemm_shape::{GemmShape, Output, WeightFormat};
use super::gemv_splitk::{self, GemvPlan};
use super::gpu::{CublasLt, Gpu};
use super::groups::GroupsPlan;
use super::int4::Int4Gemm;
use super::packed::{Packed, Packing};
use super::skinny_wgmma::{self, SkinnyPlan};
use crate::limits::{fp8, gemm_wgmma, narrow_gemm};
use pegainfer_core::cuda::BOX_COLUMNS;
use pegainfer_core::exec::Activations;
use pegainfer_core::weights::grouped::GroupFormat;

/// Kernel of a skinny GEMM, which reads each weight once and may have an epilogue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skinny {
    /// csrc/gemm/gemv_splitk.cu: mma.sync, for up to 16 rows on any GPU but Hopper.
    GemvSplitK(GemvPlan),
    /// csrc/gemm/skinny_wgmma.cu: wgmma, swap-AB (the weight is operand A), for up to 96 rows on Hopper; with FP8 weights
    /// csrc/gemm/skinny_wgmma_fp8.cu, for up to 64, of split-K 128.
    Wgmma(SkinnyPlan),
    /// Weights of four bits in groups of 128 columns, packed, on Hopper.
    Int4(Int4Gemm),
    /// csrc/gemm/skinny_groups.cuh: other packed weights, and those on any other GPU, for up to 32 rows.
    Groups(GroupsPlan),
}

impl Skinny {
    /// The skinny kernel, if it is faster than cuBLASLt for this shape.
    pub fn choose(gpu: &Gpu, shape: GemmShape) -> Option<Self> {
        if skinny_wgmma::supports(gpu, shape) {
            Some(Self::Wgmma(skinny_wgmma::plan(gpu, shape)))
        } else if gemv_splitk::supports(shape.m) && shape.format == WeightFormat::Bf16 {
            Some(Self::GemvSplitK(gemv_splitk::plan(gpu, shape)))
        } else {
            let int4 = Int4Gemm::choose(gpu, shape).map(Self::Int4);
            int4.or_else(|| GroupsPlan::choose(gpu, shape).map(Self::Groups))
        }
    }

    /// Name in records.
    pub fn name(&self) -> &'static str {
        match self {
            Self::GemvSplitK(_) => "gemv_splitk",
            Self::Wgmma(_) => "skinny_wgmma",
            Self::Int4(gemm) => gemm.name(),
            Self::Groups(_) => "skinny_groups",
        }
    }

    /// Number of splits of the columns, each of which leaves sums.
    pub fn splits(&self) -> usize {
        match self {
            Self::GemvSplitK(plan) => plan.splits,
            Self::Wgmma(plan) => plan.splits,
            Self::Int4(gemm) => gemm.splits(),
            Self::Groups(plan) => plan.splits,
        }
    }
}

/// The kernel of a GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gemm {
    /// Kernel for few rows.
    Skinny(Skinny),
    /// The library.
    CublasLt,
    /// csrc/gemm/mma.cu: tiles of this size in shared memory, if the library is missing.
    TiledMma(usize),
    /// The library, FP8 by FP8 (W8A8): activations are rounded with a scale for each 128 columns of a row.
    Fp8CublasLt,
    /// Weights of four bits are widened to FP8, exactly, and multiplied as [`Fp8CublasLt`](Self::Fp8CublasLt) (W4A8), as
    /// many rows at a time as fit the workspace.
    WidenedToFp8,
    /// FP8 or group-quantised weights are widened to bf16 for the kernel of many rows, as many rows at a time as fit the
    /// workspace.
    Widened,
    /// Parts of a stack, each with its own choice.
    Parts,
    /// csrc/gemm/narrow.cu: weights of few rows, for steps of few tokens on Hopper.
    Narrow,
}

/// Sizes of the tiles of csrc/gemm/mma.cu. Large tiles reuse more, if there are enough of them to fill the GPU.
const TILES: [usize; 2] = [64, 128];

/// Maximum number of rows of x, and of w, of csrc/gemm/narrow.cu.
const NARROW_ROWS: usize = 256;
const NARROW_WEIGHTS: usize = 128;
/// Columns of its step.
const NARROW_DEPTH: usize = 32;

impl Gemm {
    /// The fastest kernel that the GPU runs, see docs/benchmarks/h200-kernels.md.
    pub fn choose(gpu: &Gpu, shape: GemmShape) -> Self {
        match (Skinny::choose(gpu, shape), shape.format) {
            _ if Self::supports_narrow(gpu, shape) => Self::Narrow,
            (Some(skinny), _) => Self::Skinny(skinny),
            (None, WeightFormat::Bf16) => Self::large(gpu, shape.m, shape.n),
            (None, WeightFormat::Fp8) if supports_fp8_cublaslt(gpu, shape) => Self::Fp8CublasLt,
            (None, WeightFormat::Grouped(format)) if Self::widens_to_fp8(gpu, format, shape) => Self::WidenedToFp8,
            (None, WeightFormat::Fp8 | WeightFormat::Grouped(_)) => Self::Widened,
            (None, WeightFormat::Stacked) => Self::Parts,
        }
    }

    /// True if the kernel for `m` rows of x and a weight `[n, k]` multiplies FP8 by FP8, with rounded activations.
    pub(crate) fn takes_fp8(gpu: &Gpu, (m, n, k): (usize, usize, usize), format: WeightFormat) -> bool {
        match Self::choose(gpu, GemmShape { m, n, k, output: Output::Bf16, format }) {
            Self::Skinny(Skinny::Wgmma(_)) => format == WeightFormat::Fp8,
            gemm => matches!(gemm, Self::Fp8CublasLt | Self::WidenedToFp8),
        }
    }

    /// True if a weight of this format is packed integers of four bits that the library may multiply in FP8.
    fn widens_to_fp8(gpu: &Gpu, format: GroupFormat, GemmShape { n, k, .. }: GemmShape) -> bool {
        let rounds = gpu.activations == Activations::RoundedPrompts;
        rounds
            && gpu.is_hopper()
            && gpu.cublaslt == CublasLt::BlockScales
            && Packed::of(format, n, k).is_some_and(|packed| packed.packing == Packing::Int4Wide)
    }

    /// True if csrc/gemm/narrow.cu runs.
    fn supports_narrow(gpu: &Gpu, GemmShape { m, n, k, output, format }: GemmShape) -> bool {
        let plain = (output, format) == (Output::Bf16, WeightFormat::Bf16);
        let few = (1..=NARROW_ROWS).contains(&m) && (1..=NARROW_WEIGHTS).contains(&n);
        gpu.is_hopper() && plain && few && n.is_multiple_of(narrow_gemm::COLUMNS) && k.is_multiple_of(NARROW_DEPTH)
    }

    /// The kernel for many rows and bf16.
    pub(crate) fn large(gpu: &Gpu, m: usize, n: usize) -> Self {
        if gpu.cublaslt != CublasLt::Missing {
            return Self::CublasLt;
        }
        let fill = m.div_ceil(TILES[1]) * n.div_ceil(TILES[1]) >= gpu.multiprocessors;
        Self::TiledMma(TILES[usize::from(fill)])
    }

    /// Name in records.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Skinny(skinny) => skinny.name(),
            Self::CublasLt => "cublaslt",
            Self::TiledMma(64) => "gemm_mma_64",
            Self::TiledMma(_) => "gemm_mma_128",
            Self::Fp8CublasLt => "cublaslt_fp8",
            Self::WidenedToFp8 => "widened_fp8",
            Self::Widened => "widened",
            Self::Parts => "parts",
            Self::Narrow => "narrow_gemm",
        }
    }
}

/// True if the library multiplies FP8 by FP8 with block scales: on Hopper, if a row of scales of w consists of whole
/// vectors and its last block is whole.
pub(super) fn supports_fp8_cublaslt(gpu: &Gpu, GemmShape { n, k, .. }: GemmShape) -> bool {
    gpu.is_hopper()
        && gpu.cublaslt == CublasLt::BlockScales
        && k.is_multiple_of(4 * fp8::BLOCK)
        && n.is_multiple_of(fp8::BLOCK)
}

/// Kernels of `ops::linear_add_norm`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddNorm {
    /// A GEMM that leaves the partial sums of its splits; the norm adds them.
    Partials(Skinny),
    /// cuBLASLt adds to the residual stream; then the norm.
    Accumulated,
    /// Another GEMM; then residual add and norm.
    Separate(Gemm),
}

impl AddNorm {
    /// Chooses for `m` rows of `k` columns and a residual stream of `n`.
    pub fn choose(gpu: &Gpu, (m, n, k): (usize, usize, usize), format: WeightFormat) -> Self {
        match Gemm::choose(gpu, GemmShape { m, n, k, output: Output::SplitK, format }) {
            Gemm::Skinny(skinny) => Self::Partials(skinny),
            Gemm::CublasLt => Self::Accumulated,
            gemm => Self::Separate(gemm),
        }
    }

    /// Name of its GEMM in records.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Partials(skinny) => skinny.name(),
            Self::Accumulated => Gemm::CublasLt.name(),
            Self::Separate(gemm) => gemm.name(),
        }
    }
}

/// True if the large-M warpgroup kernels (csrc/gemm/wgmma.cuh) run. They process `parts` parts of a finished tile
/// between the steps of the next, which has `k` columns.
fn supports_gemm_wgmma(gpu: &Gpu, k: usize, parts: usize) -> bool {
    gpu.is_hopper() && k >= parts * BOX_COLUMNS
}

/// True if csrc/gemm/wgmma_bias.cu runs for `m` rows of `k` columns. With fewer rows its tiles leave multiprocessors
/// without work.
pub(crate) fn fuses_bias(gpu: &Gpu, m: usize, k: usize) -> bool {
    m >= Swiglu::MIN_ROWS && supports_gemm_wgmma(gpu, k, gemm_wgmma::BIAS_PARTS)
}

/// Kernels of `ops::linear_swiglu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swiglu {
    /// A skinny GEMM with a gating epilogue.
    Gated(Skinny),
    /// csrc/gemm/wgmma_swiglu.cu: a large-M warpgroup GEMM with a gating epilogue.
    Wgmma,
    /// A GEMM; then csrc/rows/swiglu.cu.
    Separate(Gemm),
}

impl Swiglu {
    /// Minimum number of rows of x for which csrc/gemm/wgmma_swiglu.cu is faster than cuBLASLt and csrc/rows/swiglu.cu, by 7
    /// % of the GEMM.
    const MIN_ROWS: usize = 512;
    /// Parts of a tile in csrc/gemm/wgmma_swiglu.cu.
    const PARTS: usize = gemm_wgmma::SWIGLU_PARTS;

    /// Chooses for `m` rows of `k` columns and a weight of `n` rows, both halves.
    pub fn choose(gpu: &Gpu, (m, n, k): (usize, usize, usize), format: WeightFormat) -> Self {
        let wgmma = format == WeightFormat::Bf16 && supports_gemm_wgmma(gpu, k, Self::PARTS);
        match Gemm::choose(gpu, GemmShape { m, n, k, output: Output::Gated, format }) {
            Gemm::Skinny(skinny) => Self::Gated(skinny),
            _ if m >= Self::MIN_ROWS && wgmma => Self::Wgmma,
            gemm => Self::Separate(gemm),
        }
    }

    /// Name in records.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Gated(skinny) => skinny.name(),
            Self::Separate(gemm) => gemm.name(),
            Self::Wgmma => "gemm_wgmma_swiglu",
        }
    }
}
