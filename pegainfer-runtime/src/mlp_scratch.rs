//! Activations inside an MLP.

use super::chosen_experts::ChosenExperts;
use pegainfer_core::tensor::Tensor;
use pegainfer_kernels::ops::Activation;

/// Scratch of an MLP: of a dense one, and of a mixture of experts.
#[derive(Debug)]
pub struct MlpScratch {
    /// Of the first GEMM, `[tokens, 2 * intermediate]`.
    pub gate_up: Tensor,
    /// `[tokens, intermediate]` in bf16 or FP8.
    pub activated: Activation,
    /// Of the router, `[tokens, route.rows()]` f32.
    pub logits: Tensor,
    /// Experts of each token, `[tokens, route.per_token()]` u32 for each layer.
    pub chosen: ChosenExperts,
    /// Their weights, f32.
    pub weights: Tensor,
}

impl MlpScratch {
    /// Sets all tensors to `tokens` rows, in bf16 where they can have several formats.
    pub(super) fn set_rows(&mut self, tokens: usize) {
        let Self { gate_up, activated, logits, weights, chosen: _ } = self;
        [gate_up, logits, weights].into_iter().for_each(|tensor| tensor.set_rows(tokens));
        activated.set_rows(tokens);
    }
}
