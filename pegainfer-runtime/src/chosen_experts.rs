//! The experts of each token in every layer of a step, which are kept until the next step.

use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, Tensor};

/// Experts of each token, `[layers, tokens, per_token]` u32: one buffer for each layer, so that those of any layer can
/// be read after a step.
#[derive(Debug)]
pub struct ChosenExperts {
    all: Tensor,
    /// Maximum number of tokens.
    tokens: usize,
}

impl ChosenExperts {
    /// Buffers for `layers` layers and steps of up to `tokens` tokens.
    pub fn new(exec: &mut Exec, layers: usize, tokens: usize, per_token: usize) -> std::io::Result<Self> {
        Ok(Self { all: exec.tensor("chosen", &[layers * tokens, per_token], DType::U32)?, tokens })
    }

    /// The buffer of `layer` for `tokens` tokens, `[tokens, per_token]`.
    pub fn of_layer(&mut self, layer: usize, tokens: usize) -> &mut Tensor {
        assert!(tokens <= self.tokens, "{tokens} tokens");
        self.all.set_range(layer * self.tokens, tokens);
        &mut self.all
    }
}
