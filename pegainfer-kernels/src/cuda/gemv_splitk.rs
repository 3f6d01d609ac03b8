//! Launch of csrc/gemv_splitk.cu: GEMMs of few rows of x, whose weights pass the tensor cores once.

use super::images;
use crate::choice::{GemvPlan, Output, gemv_tiles};
use pegainfer_core::cuda::{Cuda, Launch};
use pegainfer_core::tensor::{OpError, Tensor};

/// Launches the GEMM of `x` and `w`, whose results `out` takes as the kernel's output argument.
pub(super) fn gemv_splitk(
    gpu: &mut Cuda,
    op: &'static str,
    (x, w): (&Tensor, &Tensor),
    (plan, output): (&GemvPlan, Output),
    out: impl FnOnce(Launch) -> Launch,
) -> Result<(), OpError> {
    let ((m, k), n) = (x.rows_cols(), w.rows_cols().0);
    let kernels = match output {
        Output::Bf16 => ["gemv_splitk_bf16_8", "gemv_splitk_bf16_16"],
        Output::F32 | Output::SplitK => ["gemv_splitk_f32_8", "gemv_splitk_f32_16"],
        Output::Gated => ["gemv_splitk_gated_8", "gemv_splitk_gated_16"],
    };
    let kernel = kernels[gemv_tiles(m).ilog2() as usize];
    let launch = out(gpu.launch(op, &images::GEMV_SPLITK, kernel)?.input(x).input(w));
    let launch = launch.u32(m).u32(n).u32(k).u32(plan.split_columns).u32(plan.slots).early(w).overlapped();
    // SAFETY: matches csrc/gemv_splitk.cu; the op checked the shapes, and the plan covers all rows and columns.
    unsafe { launch.shared(plan.shared).run([plan.blocks, plan.splits, 1], 32 * plan.warps) }
}
