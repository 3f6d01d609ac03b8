//! A dense model as `ops::decode_layers` wants it.

use crate::heads::HeadShape;
use pegainfer_core::tensor::Tensor;

/// One layer of a [`DecodeModel`], all bf16.
#[derive(Debug)]
pub struct DecodeLayer<'a> {
    /// `[hidden]`.
    pub input_norm: &'a Tensor,
    /// Queries, keys, values: `[(heads + 2 kv_heads) * head_dim, hidden]`.
    pub qkv: &'a Tensor,
    /// Norms of queries and of keys, `[head_dim]`.
    pub head_norms: (&'a Tensor, &'a Tensor),
    /// Keys and values, see [`HeadShape::cache`].
    pub cache: (&'a mut Tensor, &'a mut Tensor),
    /// `[hidden, heads * head_dim]`.
    pub o: &'a Tensor,
    /// `[hidden]`.
    pub post_norm: &'a Tensor,
    /// Gate, then up: `[2 * intermediate, hidden]`.
    pub gate_up: &'a Tensor,
    /// `[hidden, intermediate]`.
    pub down: &'a Tensor,
}

/// What is the same in every step.
#[derive(Debug)]
pub struct DecodeModel<'a> {
    /// First to last, at least one.
    pub layers: Vec<DecodeLayer<'a>>,
    /// `[hidden]` bf16.
    pub final_norm: &'a Tensor,
    /// See [`rope_table`](crate::ops::rope_table()).
    pub rope: &'a Tensor,
    /// Heads of all layers.
    pub shape: HeadShape,
    /// Epsilon of every RMSNorm in the model.
    pub eps: f32,
}

impl DecodeModel<'_> {
    /// Hidden and intermediate size.
    pub(crate) fn widths(&self) -> (usize, usize) {
        (self.final_norm.elements(), self.layers.first().map_or(0, |layer| layer.down.rows_cols().1))
    }
}
