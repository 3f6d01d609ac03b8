//! Weights of four bits: launches of csrc/gemm/int4.cu, which packs them, and of the GEMMs of few rows of x,
//! csrc/gemm/skinny_int4_mma.cu, skinny_int4.cu and gemv_int4.cu.

use super::abi::{GemvInt4, Map, PackInt4, SkinnyInt4, SkinnyInt4Mma, Target, TransposeScales};
use crate::choice::{Int4Gemm, Output, Packed, mma_width};
use crate::limits::int4::THREADS;
use crate::limits::skinny_wgmma::FETCHERS;
use pegainfer_core::cuda::Cuda;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// Steps of codes that a block fetches before the producers of x are done.
const AHEAD: usize = 4;

/// Packs codes `[n, k / 2]` in place, and the scales of `from` into `to`, as csrc/common/int4.cuh describes.
pub(crate) fn pack(
    exec: &mut Exec,
    packed: Packed,
    codes: &mut Tensor,
    from: &Tensor,
    to: &mut Tensor,
) -> Result<(), OpError> {
    let (op, (n, bytes)) = ("pack_groups", codes.rows_cols());
    let gpu = exec.gpu()?;
    let launch = PackInt4::pack_int4.launch(gpu, op, PackInt4 { codes, n, k: 2 * bytes })?;
    // SAFETY: 16 bytes a thread, all covered by the grid.
    unsafe { launch.run([(n * bytes / 16).div_ceil(THREADS), 1, 1], THREADS)? };
    let (groups, pitch) = (packed.groups, from.rows_cols().1);
    let mut transpose = |to_first: u64, first: usize, bytes: usize| {
        let arguments = TransposeScales { from, to: &mut *to, to_first, n, groups, pitch, first, bytes };
        let launch = TransposeScales::transpose_scales.launch(gpu, op, arguments)?;
        // SAFETY: one number a thread, all covered by the grid.
        unsafe { launch.run([(n * groups).div_ceil(THREADS), 1, 1], THREADS) }
    };
    transpose(0, 0, 2)?;
    if packed.zeros {
        transpose(packed.zeros_at(n), 2 * groups, 1)?;
    }
    Ok(())
}

/// Launches the GEMM of `x` and packed codes and scales; writes to `out`.
pub(super) fn skinny_int4(
    gpu: &mut Cuda,
    op: &'static str,
    (x, w, scales): (&Tensor, &Tensor, &Tensor),
    packed: Packed,
    (gemm, output): (&Int4Gemm, Output),
    out: Target<'_>,
) -> Result<(), OpError> {
    let ((m, k), n) = (x.rows_cols(), w.rows_cols().0);
    let (zeros, group_shift, f16) = (packed.zeros_at(n), packed.group_shift, usize::from(packed.f16));
    let pitch = out.pitch(if output == Output::Gated { n / 2 } else { n });
    match gemm {
        Int4Gemm::Mma(plan) => {
            type Mma<'a> = SkinnyInt4Mma<'a>;
            let kernels = match output {
                Output::Bf16 => {
                    [Mma::skinny_int4_mma_bf16_8, Mma::skinny_int4_mma_bf16_16, Mma::skinny_int4_mma_bf16_32]
                }
                Output::F32 | Output::SplitK => {
                    [Mma::skinny_int4_mma_f32_8, Mma::skinny_int4_mma_f32_16, Mma::skinny_int4_mma_f32_32]
                }
                Output::Gated => {
                    [Mma::skinny_int4_mma_gated_8, Mma::skinny_int4_mma_gated_16, Mma::skinny_int4_mma_gated_32]
                }
            };
            let arguments = SkinnyInt4Mma {
                x: Map::input(op, x, m)?,
                w: Map::codes(op, w, plan.rows)?,
                scales,
                out,
                zeros,
                group_shift,
                f16,
                m,
                n,
                k,
                pitch,
                slice: plan.split_columns,
                rows: plan.rows,
                passes: plan.passes,
                strips: plan.strips,
                parts: plan.parts,
                slots: plan.slots,
                ahead: AHEAD.min(plan.slots),
            };
            let launch = kernels[mma_width(m)].launch(gpu, op, arguments)?.early(w).early(scales).overlapped();
            let threads = 32 * (plan.strips * plan.parts + 1);
            // SAFETY: the op checked the shapes, and the plan covers all rows and columns.
            unsafe { launch.shared(plan.shared).run([plan.blocks, plan.splits, 1], threads) }
        }
        Int4Gemm::Wgmma(plan) => {
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
                out,
                zeros,
                group_shift,
                f16,
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
            let launch = kernel.launch(gpu, op, arguments)?.early(w).early(scales).overlapped().shared(plan.shared);
            // SAFETY: the op checked the shapes, and the plan covers all rows and columns.
            unsafe { launch.run([plan.blocks, plan.splits, 1], 128 * plan.warpgroups + FETCHERS) }
        }
        Int4Gemm::Gemv(plan) => {
            let kernels = match output {
                Output::Bf16 => [GemvInt4::gemv_int4_bf16_8, GemvInt4::gemv_int4_bf16_16],
                Output::F32 | Output::SplitK => [GemvInt4::gemv_int4_f32_8, GemvInt4::gemv_int4_f32_16],
                Output::Gated => [GemvInt4::gemv_int4_gated_8, GemvInt4::gemv_int4_gated_16],
            };
            let (slice, parts, slots) = (plan.split_columns, plan.parts, plan.slots);
            let arguments =
                GemvInt4 { x, w, scales, out, zeros, group_shift, f16, m, n, k, pitch, slice, parts, slots };
            let launch = kernels[usize::from(m > 8)].launch(gpu, op, arguments)?.early(w).early(scales).overlapped();
            // SAFETY: the op checked the shapes, and the plan covers all rows and columns.
            unsafe { launch.shared(plan.shared).run([plan.blocks, plan.splits, 1], 32 * plan.warps) }
        }
    }
}
