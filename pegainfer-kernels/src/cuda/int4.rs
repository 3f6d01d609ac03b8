//! Weights of four bits in groups of 128 columns on Hopper: launches of the GEMMs of few rows of x,
//! csrc/gemm/skinny_int4_mma.cu and skinny_int4.cu.

use super::abi::{Map, SkinnyInt4, SkinnyInt4Mma, Target};
use crate::choice::{Int4Gemm, Output, Packed, group_width};
use crate::limits::skinny_wgmma::FETCHERS;
use pegainfer_core::cuda::Cuda;
use pegainfer_core::tensor::{OpError, Tensor};

/// Steps of codes that a block fetches before the producers of x are done.
const AHEAD: usize = 4;

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
    let (zeros, group_shift, f16) = (packed.extra_at(), packed.group_shift, usize::from(packed.dtype_number() == 0));
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
            let launch = kernels[group_width(m)].launch(gpu, op, arguments)?.early(w).early(scales).overlapped();
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
    }
}
