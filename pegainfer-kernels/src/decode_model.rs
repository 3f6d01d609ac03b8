//! A dense model in the form that `ops::decode_layers` takes.

use crate::heads::HeadShape;
use crate::ops::MatrixRef;
use pegainfer_core::tensor::Tensor;

/// One layer of a [`DecodeModel`]; norms and caches are bf16.
#[derive(Debug)]
pub struct DecodeLayer<'a> {
    /// `[hidden]`.
    pub input_norm: &'a Tensor,
    /// Queries, keys, values: `[(heads + 2 kv_heads) * head_dim, hidden]`.
    pub qkv: MatrixRef<'a>,
    /// Norms of queries and of keys, `[head_dim]`.
    pub head_norms: (&'a Tensor, &'a Tensor),
    /// Keys and values, see [`HeadShape::cache`].
    pub cache: (&'a mut Tensor, &'a mut Tensor),
    /// `[hidden, heads * head_dim]`.
    pub o: MatrixRef<'a>,
    /// `[hidden]`.
    pub post_norm: &'a Tensor,
    /// Gate, then up: `[2 * intermediate, hidden]`.
    pub gate_up: MatrixRef<'a>,
    /// `[hidden, intermediate]`.
    pub down: MatrixRef<'a>,
}

/// Properties that are the same in every step.
#[derive(Debug)]
pub struct DecodeModel<'a> {
    /// First to last, at least one.
    pub layers: Vec<DecodeLayer<'a>>,
    /// `[hidden]` bf16.
    pub final_norm: &'a Tensor,
    /// RoPE table; see [`rope_table`](crate::ops::rope_table()).
    pub rope: &'a Tensor,
    /// Heads of all layers.
    pub shape: HeadShape,
    /// Epsilon of every RMSNorm in the model.
    pub eps: f32,
}

impl DecodeModel<'_> {
    /// True if any weight is FP8.
    pub(crate) fn is_quantized(&self) -> bool {
        let quantized = |layer: &DecodeLayer<'_>| {
            [layer.qkv, layer.o, layer.gate_up, layer.down].into_iter().any(MatrixRef::is_quantized)
        };
        self.layers.iter().any(quantized)
    }

    /// Hidden and intermediate size.
    pub(crate) fn widths(&self) -> (usize, usize) {
        (self.final_norm.elements(), self.layers.first().map_or(0, |layer| layer.down.shape().1))
    }
}
