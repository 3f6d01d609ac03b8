//! Launch of csrc/gemm/gemv_splitk.cu: GEMMs of few rows of x, which read weights once.

use super::abi::{GemvSplitK, Target};
use crate::choice::{GemvPlan, Output, gemv_tiles};
use pegainfer_core::cuda::Cuda;
use pegainfer_core::tensor::{OpError, Tensor};

/// Launches the GEMM of `x` and `w`; writes to `out`.
pub(super) fn gemv_splitk(
    gpu: &mut Cuda,
    op: &'static str,
    (x, w): (&Tensor, &Tensor),
    (plan, output): (&GemvPlan, Output),
    out: Target<'_>,
) -> Result<(), OpError> {
    let ((m, k), n) = (x.rows_cols(), w.rows_cols().0);
    let kernels = match output {
        Output::Bf16 => [GemvSplitK::gemv_splitk_bf16_8, GemvSplitK::gemv_splitk_bf16_16],
        Output::F32 | Output::SplitK => [GemvSplitK::gemv_splitk_f32_8, GemvSplitK::gemv_splitk_f32_16],
        Output::Gated => [GemvSplitK::gemv_splitk_gated_8, GemvSplitK::gemv_splitk_gated_16],
    };
    let kernel = kernels[gemv_tiles(m).ilog2() as usize];
    let width = if output == Output::Gated { n / 2 } else { n };
    let pitch = out.pitch(width);
    let arguments = GemvSplitK { x, w, out, m, n, k, pitch, slice: plan.split_columns, slots: plan.slots };
    let launch = kernel.launch(gpu, op, arguments)?.early(w).overlapped();
    // SAFETY: the op checked the shapes, and the plan covers all rows and columns.
    unsafe { launch.shared(plan.shared).run([plan.blocks, plan.splits, 1], 32 * plan.warps) }
}
