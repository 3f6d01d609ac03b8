//! The router of a mixture of experts: its GEMM, and the choice of experts.

use super::route::{check_choice, route};
use super::route_spec::RouteSpec;
use crate::choice;
use crate::cuda;
use crate::ops::check::Check;
use crate::ops::linear;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// [`route`] of `logits = x · wᵀ`.
///
/// `x`: `[T, hidden]` bf16; `w`: `[spec.rows(), hidden]` bf16; `logits`: `[T, spec.rows()]` f32; `chosen` and `weights`
/// as of [`route`]. A GPU computes few tokens in one launch, others by [`linear`] and [`route`].
pub fn router(
    exec: &mut Exec,
    x: &Tensor,
    w: &Tensor,
    spec: RouteSpec,
    logits: &mut Tensor,
    (chosen, weights): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let check = Check("router");
    let (tokens, hidden) = x.rows_cols();
    check.is(x, DType::Bf16, &[tokens, hidden])?;
    check.is(w, DType::Bf16, &[spec.rows(), hidden])?;
    check.is(logits, DType::F32, &[tokens, spec.rows()])?;
    check_choice(check, tokens, spec, (chosen, weights))?;
    if choice::gpu(exec)?.is_none() || !choice::fuses_router(tokens, hidden) {
        linear(exec, x, w, &mut *logits)?;
        return route(exec, logits, spec, (chosen, weights));
    }
    exec.record(|_| {
        let flops = (2 * hidden + 4) * logits.elements();
        OpRecord::new("router", "splitk", &[x, w], &[logits, chosen, weights], flops as u64)
    });
    if exec.device() == Device::Cuda {
        cuda::moe::router(exec, x, w, spec, logits, (chosen, weights))?;
    }
    Ok(())
}
