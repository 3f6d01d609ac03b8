//! Tensors that the ops of a gated delta rule layer read.

use pegainfer_core::tensor::Tensor;

/// Inputs of the gated delta rule in one layer and step.
#[derive(Debug, Clone, Copy)]
pub struct DeltaInputs<'a> {
    /// Output of [`causal_conv1d`](crate::ops::causal_conv1d): q, k and v, `[tokens, channels]` bf16.
    pub mixed: &'a Tensor,
    /// Projection, of which b and a are read, `[tokens, projected_width]` bf16.
    pub projected: &'a Tensor,
    /// Logarithm of each head's decay rate, `[value_heads]` f32.
    pub a_log: &'a Tensor,
    /// `[value_heads]` f32.
    pub dt_bias: &'a Tensor,
    /// Segments as in [`causal_conv1d`](crate::ops::causal_conv1d), `[segments, SEGMENT_WORDS]` u32.
    pub segments: &'a Tensor,
}

/// Weights of a gated delta rule layer, without its two matrices.
#[derive(Debug, Clone, Copy)]
pub struct DeltaWeights<'a> {
    /// Weight of the convolution, `[conv_width, channels]` f32.
    pub conv: &'a Tensor,
    /// Logarithm of each head's decay rate, `[value_heads]` f32.
    pub a_log: &'a Tensor,
    /// `[value_heads]` f32.
    pub dt_bias: &'a Tensor,
    /// Weight of the norm, `[value_dim]` f32.
    pub norm: &'a Tensor,
}
