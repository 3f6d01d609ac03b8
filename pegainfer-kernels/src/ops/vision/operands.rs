//! Checks that the ops of image encoders share.

use crate::ops::check::Check;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `tensor` must have this shape, in bf16 or f32.
pub(super) fn is_values(check: Check, tensor: &Tensor, shape: &[usize]) -> Result<(), OpError> {
    let dtype = if tensor.dtype() == DType::F32 { DType::F32 } else { DType::Bf16 };
    check.is(tensor, dtype, shape)
}
