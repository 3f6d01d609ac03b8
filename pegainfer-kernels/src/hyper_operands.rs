//! Weights and constants of hyper-connections, shared by the ops and their launcher.

use pegainfer_core::tensor::Tensor;

/// Parameters of a block's mixing.
#[derive(Debug)]
pub struct HyperWeights {
    /// `[24, 4 hidden]` f32 for a block, `[4, 4 hidden]` for the head; used in f32, not in TF32.
    pub function: Tensor,
    /// `[24]` or `[4]` f32.
    pub base: Tensor,
    /// `[3]` f32: of input, output and mixing; `[1]` for the head.
    pub scale: Tensor,
}

/// Constants of the mixing.
#[derive(Debug, Clone, Copy)]
pub struct HyperSpec {
    /// Rounds of the Sinkhorn normalisation.
    pub iters: usize,
    /// Added to softmax, sums and input weights.
    pub eps: f32,
    /// Epsilon of the norm over all streams.
    pub norm_eps: f32,
}
