//! Launches of csrc/gemm/skinny_wgmma.cu and csrc/gemm/skinny_wgmma_fp8.cu: GEMMs of up to about a hundred rows of x on Hopper's
//! warpgroups.

use super::abi::{Map, SkinnyRounding, SkinnyWgmma, SkinnyWgmmaFp8, Target};
use super::blaslt::FREE_BYTES;
use super::fp8::{Rounded, round_activations};
use crate::choice::{Output, SkinnyPlan, skinny_width};
use crate::limits::skinny_wgmma::{FETCHERS, ROUNDERS};
use pegainfer_core::cuda::Cuda;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Steps of tiles that a block fetches before the producers of x are done; more delays these producers.
const AHEAD: usize = 4;

/// Launches the GEMM of `x` and `w`; writes to `out`.
pub(super) fn skinny_wgmma(
    gpu: &mut Cuda,
    op: &'static str,
    (x, w): (&Tensor, &Tensor),
    (plan, output): (&SkinnyPlan, Output),
    out: Target<'_>,
) -> Result<(), OpError> {
    let ((m, k), n) = (x.rows_cols(), w.rows_cols().0);
    let kernels = match output {
        Output::Bf16 => {
            [SkinnyWgmma::skinny_wgmma_bf16_32, SkinnyWgmma::skinny_wgmma_bf16_64, SkinnyWgmma::skinny_wgmma_bf16_96]
        }
        Output::SplitK => {
            [SkinnyWgmma::skinny_wgmma_f32_32, SkinnyWgmma::skinny_wgmma_f32_64, SkinnyWgmma::skinny_wgmma_f32_96]
        }
        Output::F32 => [
            SkinnyWgmma::skinny_wgmma_logits_32,
            SkinnyWgmma::skinny_wgmma_logits_64,
            SkinnyWgmma::skinny_wgmma_logits_96,
        ],
        Output::Gated => {
            [SkinnyWgmma::skinny_wgmma_gated_32, SkinnyWgmma::skinny_wgmma_gated_64, SkinnyWgmma::skinny_wgmma_gated_96]
        }
    };
    let pitch = out.pitch(n);
    let arguments = SkinnyWgmma {
        x: Map::input(op, x, m)?,
        w: Map::input(op, w, plan.rows)?,
        out,
        m,
        n,
        k,
        pitch,
        slice: plan.split_columns,
        rows: plan.rows,
        passes: plan.passes,
        slots: plan.slots,
        x_slots: plan.input_slots,
        ahead: AHEAD,
    };
    let launch = kernels[skinny_width(m)].launch(gpu, op, arguments)?.early(w).overlapped().shared(plan.shared);
    // SAFETY: the op checked the shapes, and the plan covers all rows and columns.
    unsafe { launch.run([plan.blocks, plan.splits, 1], 128 * plan.warpgroups + FETCHERS) }
}

/// Threads that fetch weights and round x.
const ROUNDING_PRODUCERS: usize = 32 + 32 * ROUNDERS;

/// Variant with codes and scales of FP8 weights; `x` is also rounded to FP8. For one row, the kernel rounds it itself
/// in every block; for more rows, a launch before it is faster.
pub(super) fn skinny_wgmma_fp8(
    gpu: &mut Cuda,
    op: &'static str,
    (x, codes, scales): (&Tensor, &Tensor, &Tensor),
    (plan, output): (&SkinnyPlan, Output),
    out: Target<'_>,
) -> Result<(), OpError> {
    let ((m, k), n) = (x.rows_cols(), codes.rows_cols().0);
    if m > 1 || x.dtype() == DType::E4m3 {
        return skinny_wgmma_rounded(gpu, op, (x, codes, scales), (plan, output), out);
    }
    let kernel = match output {
        Output::Bf16 => SkinnyRounding::skinny_rounding_bf16_32,
        Output::F32 | Output::SplitK => SkinnyRounding::skinny_rounding_f32_32,
        Output::Gated => SkinnyRounding::skinny_rounding_gated_32,
    };
    let pitch = out.pitch(n);
    let arguments = SkinnyRounding {
        w: Map::codes(op, codes, plan.rows)?,
        x,
        scales,
        out,
        m,
        n,
        k,
        pitch,
        slice: plan.split_columns,
        rows: plan.rows,
        passes: plan.passes,
        slots: plan.slots,
        x_slots: plan.input_slots,
        ahead: AHEAD,
    };
    let launch = kernel.launch(gpu, op, arguments)?.early(codes).early(scales).overlapped().shared(plan.shared);
    // SAFETY: the op checked the shapes, and the plan covers all rows and columns.
    unsafe { launch.run([plan.blocks, plan.splits, 1], 128 * plan.warpgroups + ROUNDING_PRODUCERS) }
}

/// Variant by a kernel that takes rounded `x`: if it is not rounded, rounds it to FP8 in the half of the workspace
/// without partial sums.
fn skinny_wgmma_rounded(
    gpu: &mut Cuda,
    op: &'static str,
    (x, codes, scales): (&Tensor, &Tensor, &Tensor),
    (plan, output): (&SkinnyPlan, Output),
    out: Target<'_>,
) -> Result<(), OpError> {
    let ((m, k), n) = (x.rows_cols(), codes.rows_cols().0);
    let kernel = match (output, skinny_width(m)) {
        (Output::Bf16, 0) => SkinnyWgmmaFp8::skinny_fp8_bf16_32,
        (Output::Bf16, _) => SkinnyWgmmaFp8::skinny_fp8_bf16_64,
        (Output::F32 | Output::SplitK, 0) => SkinnyWgmmaFp8::skinny_fp8_f32_32,
        (Output::F32 | Output::SplitK, 1) => SkinnyWgmmaFp8::skinny_fp8_f32_64,
        (Output::F32 | Output::SplitK, 2) => SkinnyWgmmaFp8::skinny_fp8_f32_96,
        (Output::F32 | Output::SplitK, _) => SkinnyWgmmaFp8::skinny_fp8_f32_128,
        (Output::Gated, 0) => SkinnyWgmmaFp8::skinny_fp8_gated_32,
        (Output::Gated, _) => SkinnyWgmmaFp8::skinny_fp8_gated_64,
    };
    let pitch = out.pitch(n);
    let (rounded, map) = match x.dtype() {
        DType::E4m3 => (Rounded::of(x), Map::codes(op, x, m)?),
        _ => {
            let to = gpu.workspace() + FREE_BYTES as u64;
            let rounded = round_activations(gpu, op, x, (0, m), to)?;
            let map = Map::scratch_codes(op, rounded.codes, (m, k), m)?;
            (rounded, map)
        }
    };
    let arguments = SkinnyWgmmaFp8 {
        x: map,
        w: Map::codes(op, codes, plan.rows)?,
        x_scales: rounded.scales,
        scales,
        out,
        scale_rows: rounded.rows,
        m,
        n,
        k,
        pitch,
        slice: plan.split_columns,
        rows: plan.rows,
        passes: plan.passes,
        slots: plan.slots,
        x_slots: plan.input_slots,
        ahead: AHEAD,
    };
    let launch = kernel.launch(gpu, op, arguments)?.early(codes).early(scales);
    // SAFETY: the op checked the shapes, and the plan covers all rows and columns.
    unsafe {
        launch.overlapped().shared(plan.shared).run([plan.blocks, plan.splits, 1], 128 * plan.warpgroups + FETCHERS)
    }
}
