//! Launch of csrc/skinny_wgmma.cu: GEMMs of up to about a hundred rows of x on Hopper's warpgroups.

use super::images;
use crate::choice::{Output, SkinnyPlan, skinny_width};
use pegainfer_core::cuda::{Cuda, Launch, TensorMap};
use pegainfer_core::tensor::{OpError, Tensor};

/// As in csrc/skinny_wgmma.cu: threads that fetch.
const FETCHERS: usize = 64;
/// Steps of tiles that a block fetches before the kernels that produce x are done: more delays what those wait for.
const AHEAD: usize = 4;

/// Launches the GEMM of `x` and `w`, whose results `out` takes as the kernel's output argument.
pub(super) fn skinny_wgmma(
    gpu: &mut Cuda,
    op: &'static str,
    (x, w): (&Tensor, &Tensor),
    (plan, output): (&SkinnyPlan, Output),
    out: impl FnOnce(Launch) -> Launch,
) -> Result<(), OpError> {
    let ((m, k), n) = (x.rows_cols(), w.rows_cols().0);
    let kernels = match output {
        Output::Bf16 => ["skinny_wgmma_bf16_32", "skinny_wgmma_bf16_64", "skinny_wgmma_bf16_96"],
        Output::SplitK => ["skinny_wgmma_f32_32", "skinny_wgmma_f32_64", "skinny_wgmma_f32_96"],
        Output::F32 => ["skinny_wgmma_logits_32", "skinny_wgmma_logits_64", "skinny_wgmma_logits_96"],
        Output::Gated => ["skinny_wgmma_gated_32", "skinny_wgmma_gated_64", "skinny_wgmma_gated_96"],
    };
    let maps = (TensorMap::new(op, x, m)?, TensorMap::new(op, w, plan.rows)?);
    let launch = gpu.launch(op, &images::SKINNY_WGMMA, kernels[skinny_width(m)])?.early(w).overlapped();
    let launch = out(launch.map(maps.0).map(maps.1));
    let launch = launch.u32(m).u32(n).u32(k).u32(plan.split_columns).u32(plan.rows).u32(plan.passes);
    let launch = launch.u32(plan.slots).u32(plan.input_slots).u32(AHEAD).shared(plan.shared);
    // SAFETY: matches csrc/skinny_wgmma.cu; the op checked the shapes, and the plan covers all rows and columns.
    unsafe { launch.run([plan.blocks, plan.splits, 1], 128 * plan.warpgroups + FETCHERS) }
}
