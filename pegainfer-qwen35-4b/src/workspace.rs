//! The activations of a step, allocated once for the largest.

use crate::config::Config;
use pegainfer_core::exec::{AliasedTensor, Device, Exec};
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::{self, SEGMENT_WORDS};
use pegainfer_kernels::runtime::{Activations, Bounds, gather_rows};

/// Activations of a step, bf16 unless they say otherwise, of `tokens` rows until the last layer gathers the sampled ones.
/// Widths are those of `DeltaShape` and `HeadShape`.
#[derive(Debug)]
pub struct Workspace {
    /// Rotary angles, see [`ops::rope_table`]; written when it is allocated.
    pub rope: Tensor,
    /// Where the recurrent state of each run of tokens comes from and goes, `[segments, SEGMENT_WORDS]` u32.
    pub segments: Tensor,
    /// The residual stream and the MLP's.
    pub activations: Activations,
    /// With a layer that drafts: the normalised output of the last layer for the sampled tokens, while `activations.normed` has that
    /// of all tokens, `[tokens, hidden]`. Scratch while it drafts.
    pub sampled: Option<Tensor>,
    /// Of a gated delta rule layer, `[tokens, projected_width]`.
    pub projected: Tensor,
    /// `[tokens, channels]`.
    pub mixed: Tensor,
    /// Scratch for the delta rule in chunks, bytes; empty on a CPU.
    pub chunks: Tensor,
    /// What the queries read, `[tokens, v_width]` f32.
    pub read: Tensor,
    /// `[tokens, v_width]`.
    pub gated: Tensor,
    /// Of a full attention layer, `[tokens, gated_qkv_width]`.
    pub qkv: Tensor,
    /// Scratch for the sampled rows of `qkv`, of its shape.
    pub sampled_qkv: Tensor,
    /// `[tokens, heads * head_dim]`.
    pub q: Tensor,
    /// `[tokens, heads * head_dim]`.
    pub attended: Tensor,
}

impl Workspace {
    pub(crate) fn new(exec: &mut Exec, config: &Config, bounds: &Bounds) -> std::io::Result<Self> {
        let (tokens, segments) = (bounds.size.tokens, max_segments(bounds));
        let rope = ops::rope_table(exec, bounds.size.context, config.rotary_dim, config.rope)?;
        let gpu = exec.device() == Device::Cuda;
        let chunks = if gpu { config.delta.chunk_scratch(tokens, segments) } else { 0 };
        let chunks = exec.tensor("chunks", &[chunks], DType::U8)?;
        let widths = (config.hidden_size, config.intermediate_size);
        let (rule, attention) = mixer_scratch(config, tokens);
        let (activations, [projected, mixed, read, gated, qkv, sampled_qkv, q, attended]) =
            Activations::new(exec, widths, tokens, &[&rule, &attention])?;
        let sampled = config.mtp.then(|| exec.tensor("sampled", &[tokens, config.hidden_size], DType::Bf16));
        let sampled = sampled.transpose()?;
        let segments = exec.tensor("segments", &[segments, SEGMENT_WORDS], DType::U32)?;
        Ok(Self {
            rope,
            segments,
            activations,
            sampled,
            projected,
            mixed,
            chunks,
            read,
            gated,
            qkv,
            sampled_qkv,
            q,
            attended,
        })
    }

    /// Bytes for each token on a GPU, without what each segment takes.
    pub(crate) fn bytes_per_token(config: &Config) -> u64 {
        const MANY: usize = 1 << 10;
        let (rule, attention) = mixer_scratch(config, 1);
        let chunks = config.delta.chunk_scratch(MANY, 0) / MANY;
        let widths = (config.hidden_size, config.intermediate_size);
        let sampled = if config.mtp { config.hidden_size * DType::Bf16.size() } else { 0 };
        Activations::bytes_per_token(widths, &[&rule, &attention]) + (chunks + sampled) as u64
    }

    /// Goes on with `rows` (`[n]` u32) of the residual stream and of the queries with their gates, before full attention.
    pub(crate) fn gather_queries(&mut self, exec: &mut Exec, rows: &Tensor) -> Result<(), OpError> {
        let Self { activations: Activations { residual, delta, .. }, q, attended, qkv, sampled_qkv, .. } = self;
        attended.set_dtype(DType::Bf16);
        gather_rows(exec, rows, [(residual, delta), (q, attended), (qkv, sampled_qkv)])?;
        self.set_rows(rows.elements());
        Ok(())
    }

    /// Goes on with `rows` (`[n]` u32) of the residual stream and of the output of full attention.
    pub(crate) fn gather_outputs(&mut self, exec: &mut Exec, rows: &Tensor) -> Result<(), OpError> {
        let Self { activations: Activations { residual, delta, .. }, q, attended, .. } = self;
        gather_rows(exec, rows, [(residual, delta), (attended, q)])?;
        self.set_rows(rows.elements());
        Ok(())
    }

    pub(crate) fn set_rows(&mut self, tokens: usize) {
        self.activations.set_rows(tokens);
        let Self { sampled, projected, mixed, read, gated, qkv, sampled_qkv, q, attended, .. } = self;
        gated.set_dtype(DType::Bf16);
        attended.set_dtype(DType::Bf16);
        for tensor in [projected, mixed, read, gated, qkv, sampled_qkv, q, attended].into_iter().chain(sampled) {
            tensor.set_rows(tokens);
        }
    }
}

/// Segments of the largest step. Each ends where a snapshot is made (one more than whole intervals fit, and one at the end
/// of a prompt), or with its row.
fn max_segments(bounds: &Bounds) -> usize {
    bounds.size.tokens / bounds.snapshot_interval + 3 * bounds.size.rows
}

/// Scratch of the gated delta rule for `tokens` tokens, and of full attention.
fn mixer_scratch(config: &Config, tokens: usize) -> ([AliasedTensor<'static>; 4], [AliasedTensor<'static>; 4]) {
    let (shape, delta) = (config.shape, config.delta);
    let bf16 = |name, width| (name, [tokens, width], DType::Bf16);
    (
        [
            bf16("projected", delta.projected_width()),
            bf16("mixed", delta.channels()),
            ("read", [tokens, delta.v_width()], DType::F32),
            bf16("gated", delta.v_width()),
        ],
        [
            bf16("qkv", shape.gated_qkv_width()),
            bf16("sampled_qkv", shape.gated_qkv_width()),
            bf16("q", shape.q_width()),
            bf16("attended", shape.q_width()),
        ],
    )
}
