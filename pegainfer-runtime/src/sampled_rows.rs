//! Gathers the sampled rows in the last layer; the others are dropped.

use super::inputs::Inputs;
use pegainfer_core::exec::Exec;
use pegainfer_core::schedule::Step;
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_kernels::ops;

/// Which tokens of a step are sampled; the others need nothing after the keys and values of the last layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SampledRows {
    /// Every token, in order: no gather.
    All,
    /// No token: the step ends with the state of the last layer.
    None,
    /// At most the last token of each row: attention runs on gathered queries; see [`Inputs::sampled_attention`].
    RowEnds,
    /// Other tokens as well, for prompt logprobs: the output of attention is gathered.
    Some,
}

impl SampledRows {
    /// Sampled rows of `step`, which `inputs` was filled with.
    pub fn of<R: Clone + Default>(step: &Step<R>, inputs: &Inputs) -> Self {
        match (step.samples_every_token(), inputs.samples_end_rows()) {
            (true, _) => Self::All,
            (false, true) if step.samples.is_empty() => Self::None,
            (false, true) => Self::RowEnds,
            (false, false) => Self::Some,
        }
    }
}

/// Gathers `rows` (`[n]` u32, each below `tokens`) of the first tensor of each pair, `[tokens, width]` bf16. Swaps it
/// with the second one, which has the same shape and whose values are lost.
pub fn gather_rows<const N: usize>(
    exec: &mut Exec,
    rows: &Tensor,
    pairs: [(&mut Tensor, &mut Tensor); N],
) -> Result<(), OpError> {
    for (tensor, scratch) in pairs {
        scratch.set_rows(rows.elements());
        ops::gather_rows(exec, tensor, rows, scratch)?;
        std::mem::swap(tensor, scratch);
    }
    Ok(())
}
