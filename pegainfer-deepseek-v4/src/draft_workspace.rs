//! Activations of the layer that drafts (multi-token prediction), in addition to those of the model's layers.

use crate::config::{Config, STREAMS};
use crate::normed::Normed;
use crate::numerics::Numerics;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, Tensor};

/// Number of tokens whose residual streams are projected at once; limits the memory of [`DraftWorkspace::streams`].
const JOINED_TOKENS: usize = 256;

/// Workspace and constants of the layer that drafts, allocated once for the largest step.
#[derive(Debug)]
pub(crate) struct DraftWorkspace {
    /// Normalised residual streams of up to 256 tokens, a row for each stream, `[4 * tokens, hidden]`.
    pub streams: Normed,
    /// `post` of a `hyper_merge` that adds the block's output unchanged to each stream: ones, `[tokens, 4]` f32.
    pub add: Tensor,
    /// `comb` of a `hyper_merge` that does not mix the streams: identities, `[tokens, 4, 4]` f32.
    pub keep: Tensor,
}

impl DraftWorkspace {
    /// A workspace for steps of up to `tokens` tokens.
    pub fn new(exec: &mut Exec, config: &Config, numerics: Numerics, tokens: usize) -> std::io::Result<Self> {
        let rows = STREAMS * tokens.min(JOINED_TOKENS);
        let (hidden, quantize) = (config.hidden_size, numerics.quantize_activations);
        let streams = Normed::new(exec, "draft_streams", (rows, hidden), numerics.activations, quantize)?;
        let mut add = exec.tensor("draft_add", &[tokens, STREAMS], DType::F32)?;
        let mut keep = exec.tensor("draft_keep", &[tokens, STREAMS, STREAMS], DType::F32)?;
        let on_diagonal = |i: usize| (i % (STREAMS * STREAMS)).is_multiple_of(STREAMS + 1);
        let ones = exec.write(&mut add, 0..tokens * STREAMS, |_, out: &mut [f32]| out.fill(1.0));
        let identities = exec.write(&mut keep, 0..tokens * STREAMS * STREAMS, |first, out: &mut [f32]| {
            out.iter_mut().zip(first..).for_each(|(out, i)| *out = f32::from(u8::from(on_diagonal(i))));
        });
        ones.and(identities).map_err(std::io::Error::other)?;
        Ok(Self { streams, add, keep })
    }
}
