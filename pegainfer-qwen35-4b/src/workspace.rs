//! Activations of a step, allocated once for the largest step.

use crate::config::Config;
use crate::plan::runs_in_chunks;
use crate::vision::rows::ImageRows;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, Tensor};
use pegainfer_kernels::ops::{Activation, SEGMENT_WORDS};
use pegainfer_runtime::{Bounds, DecoderWorkspace};

/// Activations of a step, bf16 unless noted otherwise, with `tokens` rows until the last layer gathers the sampled
/// ones. Widths are those of `DeltaShape`.
#[derive(Debug)]
pub struct Workspace {
    /// Source and destination of the recurrent state of each segment, `[segments, SEGMENT_WORDS]` u32.
    pub segments: Tensor,
    /// The residual stream, full attention's and the MLP's.
    pub decoder: DecoderWorkspace,
    /// With a layer that drafts: the normalised output of the last layer for the sampled tokens, while `normed` has
    /// that of all tokens, `[tokens, hidden]`. Scratch during drafting.
    pub sampled: Option<Tensor>,
    /// Projected input of a gated delta rule layer, `[tokens, projected_width]`.
    pub projected: Tensor,
    /// `[tokens, channels]`.
    pub mixed: Tensor,
    /// Scratch for the delta rule in chunks, bytes; empty on a CPU.
    pub chunks: Tensor,
    /// Result of the queries, `[tokens, v_width]` f32.
    pub read: Tensor,
    /// `[tokens, v_width]` in bf16 or FP8.
    pub gated: Activation,
    /// The vision tower and the rows of images, if the model reads images.
    pub images: Option<ImageRows>,
}

impl Workspace {
    pub(crate) fn new(exec: &mut Exec, config: &Config, bounds: &Bounds) -> std::io::Result<Self> {
        let (tokens, segments, delta) = (bounds.size.tokens, max_segments(bounds), config.delta);
        let chunks = if runs_in_chunks(exec.device()) { delta.chunk_scratch(tokens, segments) } else { 0 };
        let chunks = exec.tensor("chunks", &[chunks], DType::U8)?;
        let rule = [
            ("projected", [tokens, delta.projected_width()], DType::Bf16),
            ("mixed", [tokens, delta.channels()], DType::Bf16),
            ("read", [tokens, delta.v_width()], DType::F32),
            ("gated", [tokens, delta.v_width()], DType::Bf16),
        ];
        let (decoder, [projected, mixed, read, gated]) =
            DecoderWorkspace::new(exec, &config.decoder(), bounds.size, rule)?;
        let sampled = config.mtp.then(|| exec.tensor("sampled", &[tokens, config.hidden_size], DType::Bf16));
        let (sampled, gated) = (sampled.transpose()?, Activation::new(gated));
        let segments = exec.tensor("segments", &[segments, SEGMENT_WORDS], DType::U32)?;
        let images = config.vision.map(|vision| ImageRows::new(exec, vision)).transpose()?;
        Ok(Self { segments, decoder, sampled, projected, mixed, chunks, read, gated, images })
    }

    /// Sets all tensors to `tokens` rows, in bf16.
    pub(crate) fn set_rows(&mut self, tokens: usize) {
        let Self { decoder, sampled, projected, mixed, read, gated, .. } = self;
        decoder.set_rows(tokens);
        for tensor in [projected, mixed, read].into_iter().chain(sampled) {
            tensor.set_rows(tokens);
        }
        gated.set_rows(tokens);
    }
}

/// Maximum number of segments in a step. A segment ends at a snapshot or with its row; a row has one snapshot more than
/// whole intervals fit, and one at the end of its prompt.
fn max_segments(bounds: &Bounds) -> usize {
    bounds.size.tokens / bounds.snapshot_interval + 3 * bounds.size.rows
}
