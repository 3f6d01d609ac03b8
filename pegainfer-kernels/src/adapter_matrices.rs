//! Operands of `ops::lora`.

use pegainfer_core::tensor::Tensor;

/// The matrices of a projection in all slots.
#[derive(Debug)]
pub struct AdapterMatrices {
    /// `[adapters, segments * rank, k]` bf16.
    pub a: Tensor,
    /// `[adapters, width, rank]` bf16, with the adapter's scale folded in.
    pub b: Tensor,
    /// Columns of each segment, which are stacked; at most [`MAX_SEGMENTS`](crate::ops::lora::MAX_SEGMENTS).
    pub segments: Vec<usize>,
}
