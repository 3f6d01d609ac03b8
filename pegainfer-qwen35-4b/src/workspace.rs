//! The activations of a step, allocated once for the largest.

use crate::config::Config;
use pegainfer_core::exec::{Device, Exec, Room, turns_bytes};
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::step::keep_rows;

/// Activations, allocated once for the largest step; widths are those of `DeltaShape` and `HeadShape`. `tokens` rows, until
/// the last layer narrows them.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// The residual stream, `[tokens, hidden]`.
    pub residual: Tensor,
    /// Its normalised value, input of the projections, `[tokens, hidden]`.
    pub normed: Tensor,
    /// Room for the output of a block before it is added to the residual, `[tokens, hidden]`.
    pub delta: Tensor,
    /// Of a gated delta rule layer, `[tokens, projected_width]`.
    pub projected: Tensor,
    /// `[tokens, channels]`.
    pub mixed: Tensor,
    /// Room for the delta rule in chunks, bytes; not on a CPU.
    pub chunks: Tensor,
    /// What the queries read, `[tokens, v_width]` f32.
    pub read: Tensor,
    /// `[tokens, v_width]`.
    pub gated: Tensor,
    /// Of a full attention layer, `[tokens, gated_qkv_width]`.
    pub qkv: Tensor,
    /// Room for the rows of `qkv` that the last layer goes on with, of its shape.
    pub kept: Tensor,
    /// `[tokens, heads * head_dim]`.
    pub q: Tensor,
    /// `[tokens, heads * head_dim]`.
    pub attended: Tensor,
    /// Room for the MLP's products, `[tokens, 2 * intermediate]`.
    pub gate_up: Tensor,
    /// `[tokens, intermediate]`.
    pub activated: Tensor,
}

impl Workspace {
    pub fn new(exec: &mut Exec, config: &Config, tokens: usize, segments: usize) -> std::io::Result<Self> {
        let gpu = exec.device() == Device::Cuda;
        let chunks = if gpu { config.delta.chunk_scratch(tokens, segments) } else { 0 };
        let chunks = exec.tensor("chunks", &[chunks], DType::U8)?;
        let mut hidden = |name: &str| exec.tensor(name, &[tokens, config.hidden_size], DType::Bf16);
        let (residual, normed, delta) = (hidden("residual")?, hidden("normed")?, hidden("delta")?);
        let (rule, attention, mlp) = turns(config, tokens);
        let [projected, mixed, read, gated, qkv, kept, q, attended, gate_up, activated] =
            exec.in_turns(&[&rule, &attention, &mlp])?;
        Ok(Self {
            residual,
            normed,
            delta,
            projected,
            mixed,
            chunks,
            read,
            gated,
            qkv,
            kept,
            q,
            attended,
            gate_up,
            activated,
        })
    }

    /// Bytes for each token on a GPU, without what each segment takes.
    pub fn token_bytes(config: &Config) -> u64 {
        const MANY: usize = 1 << 10;
        let (rule, attention, mlp) = turns(config, 1);
        let chunks = config.delta.chunk_scratch(MANY, 0) / MANY;
        (3 * config.hidden_size * DType::Bf16.size() + turns_bytes(&[&rule, &attention, &mlp]) + chunks) as u64
    }

    /// Goes on with `rows` (`[n]` u32) of the residual stream and of the queries with their gates, before full attention.
    pub fn keep_queries(&mut self, exec: &mut Exec, rows: &Tensor) -> Result<(), OpError> {
        let Self { residual, delta, q, attended, qkv, kept, .. } = self;
        keep_rows(exec, rows, [(residual, delta), (q, attended), (qkv, kept)])?;
        self.set_rows(rows.elements());
        Ok(())
    }

    /// Goes on with `rows` (`[n]` u32) of the residual stream and of the output of full attention.
    pub fn keep_outputs(&mut self, exec: &mut Exec, rows: &Tensor) -> Result<(), OpError> {
        let Self { residual, delta, q, attended, .. } = self;
        keep_rows(exec, rows, [(residual, delta), (attended, q)])?;
        self.set_rows(rows.elements());
        Ok(())
    }

    pub fn set_rows(&mut self, tokens: usize) {
        let Self { residual, normed, delta, projected, mixed, read, gated, .. } = self;
        for tensor in [residual, normed, delta, projected, mixed, read, gated] {
            tensor.set_rows(tokens);
        }
        let Self { qkv, kept, q, attended, gate_up, activated, .. } = self;
        for tensor in [qkv, kept, q, attended, gate_up, activated] {
            tensor.set_rows(tokens);
        }
    }
}

/// What the gated delta rule has for `tokens` tokens, what full attention has, and what the MLP has.
fn turns(config: &Config, tokens: usize) -> ([Room<'static>; 4], [Room<'static>; 4], [Room<'static>; 2]) {
    let (shape, delta, width) = (config.shape, config.delta, config.intermediate_size);
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
            bf16("kept", shape.gated_qkv_width()),
            bf16("q", shape.q_width()),
            bf16("attended", shape.q_width()),
        ],
        [bf16("gate_up", 2 * width), bf16("activated", width)],
    )
}
