//! `round_activation` (csrc/deepseek_v4/quant.cu).

use super::run;
use crate::cuda::abi::RoundActivation;
use crate::limits::deepseek_v4::HEAD_THREADS;
use crate::limits::deepseek_v4_gemm::DEPTH;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

pub(crate) fn round_activation(exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
    let (groups, dtype) = (x.elements() / DEPTH, x.dtype());
    let entries = [RoundActivation::round_activation_bf16, RoundActivation::round_activation_f32];
    let grid = ([groups.div_ceil(HEAD_THREADS / 32), 1, 1], HEAD_THREADS);
    run(exec, "round_activation", entries, dtype, RoundActivation { x, groups }, grid)
}
