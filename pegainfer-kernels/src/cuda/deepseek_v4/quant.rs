//! `round_activation` and `quantize_index` (csrc/deepseek_v4_quant.cu).

use super::{head_shape, heads, run};
use crate::cuda::abi::{QuantizeIndex, RoundActivation};
use crate::limits::deepseek_v4::MAX_INDEX_DIM;
use crate::limits::deepseek_v4_gemm::DEPTH;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

pub(crate) fn round_activation(exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
    let (groups, dtype) = (x.elements() / DEPTH, x.dtype());
    let entries = [RoundActivation::round_activation_bf16, RoundActivation::round_activation_f32];
    run(exec, "round_activation", entries, dtype, RoundActivation { x, groups }, heads(groups))
}

pub(crate) fn quantize_index(exec: &mut Exec, x: &mut Tensor, quantize: bool) -> Result<(), OpError> {
    let ((count, dim), dtype) = (head_shape(x), x.dtype());
    if dim > MAX_INDEX_DIM {
        let message = format!("heads of {dim} elements: the GPU kernel takes {MAX_INDEX_DIM}");
        return Err(OpError { op: "quantize_index", message });
    }
    let entries = [QuantizeIndex::quantize_index_bf16, QuantizeIndex::quantize_index_f32];
    let arguments = QuantizeIndex { x, heads: count, dim, low_precision: usize::from(quantize) };
    run(exec, "quantize_index", entries, dtype, arguments, heads(count))
}
