//! Weights of four bits in groups of 128 columns on Hopper: launches of the GEMMs of few rows of x,
//! csrc/gemm/skinny_int4_mma.cu and skinny_int4.cu.

use super::abi::{Map, SkinnyInt4, SkinnyInt4Mma, Target};
use super::groups::PackedWeight;
use crate::choice::{Int4Gemm, Int4MmaPlan, Output, Packed, SkinnyPlan, group_width};
use crate::limits::skinny_wgmma::FETCHERS;
use pegainfer_core::cuda::Cuda;
use pegainfer_core::tensor::{OpError, Tensor};

/// Steps of codes that a block fetches before the producers of x are done.
const AHEAD: usize = 4;

/// Launches the GEMM of `x` and `w`; writes to `out`.
pub(super) fn skinny_int4(
    gpu: &mut Cuda,
    op: &'static str,
    x: &Tensor,
    w: PackedWeight<'_>,
    (gemm, output): (&Int4Gemm, Output),
    out: Target<'_>,
) -> Result<(), OpError> {
    match gemm {
        Int4Gemm::Mma(plan) => mma(gpu, op, x, w, (plan, output), out),
        Int4Gemm::Wgmma(plan) => wgmma(gpu, op, x, w, (plan, output), out),
    }
}

/// Columns of `out` for a weight of `n` rows.
fn columns(output: Output, n: usize) -> usize {
    if output == Output::Gated { n / 2 } else { n }
}

/// 1 if scales are f16, 0 if they are bf16.
fn f16(layout: Packed) -> usize {
    usize::from(layout.dtype_number() == 0)
}

/// Launches csrc/gemm/skinny_int4_mma.cu.
fn mma(
    gpu: &mut Cuda,
    op: &'static str,
    x: &Tensor,
    PackedWeight { layout, codes: w, scales, .. }: PackedWeight<'_>,
    (plan, output): (&Int4MmaPlan, Output),
    out: Target<'_>,
) -> Result<(), OpError> {
    type Mma<'a> = SkinnyInt4Mma<'a>;
    let ((m, k), n) = (x.rows_cols(), w.rows_cols().0);
    let kernels = match output {
        Output::Bf16 => [Mma::skinny_int4_mma_bf16_8, Mma::skinny_int4_mma_bf16_16, Mma::skinny_int4_mma_bf16_32],
        Output::F32 | Output::SplitK => {
            [Mma::skinny_int4_mma_f32_8, Mma::skinny_int4_mma_f32_16, Mma::skinny_int4_mma_f32_32]
        }
        Output::Gated => [Mma::skinny_int4_mma_gated_8, Mma::skinny_int4_mma_gated_16, Mma::skinny_int4_mma_gated_32],
    };
    let arguments = SkinnyInt4Mma {
        x: Map::input(op, x, m)?,
        w: Map::codes(op, w, plan.rows)?,
        scales,
        pitch: out.pitch(columns(output, n)),
        out,
        zeros: layout.extra_at(),
        group_shift: layout.group_shift,
        f16: f16(layout),
        m,
        n,
        k,
        slice: plan.split_columns,
        rows: plan.rows,
        passes: plan.passes,
        strips: plan.strips,
        parts: plan.parts,
        slots: plan.slots,
        ahead: AHEAD.min(plan.slots),
    };
    let launch = kernels[group_width(m)].launch(gpu, op, arguments)?.early(w).early(scales).overlapped();
    let threads = 32 * (plan.strips * plan.parts + 1);
    // SAFETY: the op checked the shapes, and the plan covers all rows and columns.
    unsafe { launch.shared(plan.shared).run([plan.blocks, plan.splits, 1], threads) }
}

/// Launches csrc/gemm/skinny_int4.cu.
fn wgmma(
    gpu: &mut Cuda,
    op: &'static str,
    x: &Tensor,
    PackedWeight { layout, codes: w, scales, .. }: PackedWeight<'_>,
    (plan, output): (&SkinnyPlan, Output),
    out: Target<'_>,
) -> Result<(), OpError> {
    let ((m, k), n) = (x.rows_cols(), w.rows_cols().0);
    let kernel = match (output, m <= 64) {
        (Output::Bf16, true) => SkinnyInt4::skinny_int4_bf16_64,
        (Output::Bf16, false) => SkinnyInt4::skinny_int4_bf16_128,
        (Output::F32 | Output::SplitK, true) => SkinnyInt4::skinny_int4_f32_64,
        (Output::F32 | Output::SplitK, false) => SkinnyInt4::skinny_int4_f32_128,
        (Output::Gated, _) => SkinnyInt4::skinny_int4_gated_64,
    };
    let arguments = SkinnyInt4 {
        x: Map::input(op, x, m)?,
        w: Map::codes(op, w, plan.rows)?,
        scales,
        pitch: out.pitch(columns(output, n)),
        out,
        zeros: layout.extra_at(),
        group_shift: layout.group_shift,
        f16: f16(layout),
        m,
        n,
        k,
        slice: plan.split_columns,
        rows: plan.rows,
        passes: plan.passes,
        slots: plan.slots,
        x_slots: plan.input_slots,
        ahead: AHEAD,
    };
    let launch = kernel.launch(gpu, op, arguments)?.early(w).early(scales).overlapped().shared(plan.shared);
    // SAFETY: the op checked the shapes, and the plan covers all rows and columns.
    unsafe { launch.run([plan.blocks, plan.splits, 1], 128 * plan.warpgroups + FETCHERS) }
}
