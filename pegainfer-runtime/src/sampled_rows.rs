//! The last layer goes on with the sampled rows only.

use super::inputs::Inputs;
use pegainfer_core::exec::Exec;
use pegainfer_core::schedule::Step;
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_kernels::ops;

/// Which tokens of a step are sampled: after the keys and values of the last layer, nothing else is wanted of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SampledRows {
    /// Every token, in order: there is nothing to gather.
    All,
    /// No token: the step ends with the state of the last layer.
    None,
    /// At most the last token of each row: attention runs on gathered queries, see [`Inputs::sampled_attention`].
    RowEnds,
    /// Others too, because prompt logprobs are wanted: the output of attention is gathered.
    Some,
}

impl SampledRows {
    /// Of `step`, with which `inputs` was filled.
    pub fn of<R: Clone + Default>(step: &Step<R>, inputs: &Inputs) -> Self {
        match (step.samples_every_token(), inputs.samples_end_rows()) {
            (true, _) => Self::All,
            (false, true) if step.samples.is_empty() => Self::None,
            (false, true) => Self::RowEnds,
            (false, false) => Self::Some,
        }
    }
}

/// Gathers `rows` (`[n]` u32, each below `tokens`) of the first tensor of each pair, `[tokens, width]` bf16. It changes
/// places with the second, which has the same shape and whose values are lost.
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
