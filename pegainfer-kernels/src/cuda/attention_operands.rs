//! Operands shared by the kernels of `ops::attention`.

use crate::ops::{AttentionBatch, HeadShape};
use pegainfer_core::tensor::Tensor;

/// The operands of [`ops::attention`](crate::ops::attention), checked there; `scale` is for exp2.
#[derive(Clone, Copy)]
pub(super) struct Operands<'a, 'b> {
    pub q: &'a Tensor,
    pub k: &'a Tensor,
    pub v: &'a Tensor,
    pub batch: &'a AttentionBatch<'b>,
    pub shape: HeadShape,
    pub scale: f32,
}
