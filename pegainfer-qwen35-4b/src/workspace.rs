//! The activations of a step, allocated once for the largest.

use crate::config::Config;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops;

/// Activations, allocated once for the largest step; widths are those of `DeltaShape` and `HeadShape`. `tokens` rows, until
/// [`keep_rows`](Self::keep_rows).
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
        let mut room = |name: &str, width: usize, dtype| exec.tensor(name, &[tokens, width], dtype);
        let (hidden, width) = (config.hidden_size, config.intermediate_size);
        let (shape, delta) = (config.shape, config.delta);
        Ok(Self {
            residual: room("residual", hidden, DType::Bf16)?,
            normed: room("normed", hidden, DType::Bf16)?,
            delta: room("delta", hidden, DType::Bf16)?,
            projected: room("projected", delta.projected_width(), DType::Bf16)?,
            mixed: room("mixed", delta.channels(), DType::Bf16)?,
            chunks,
            read: room("read", delta.v_width(), DType::F32)?,
            gated: room("gated", delta.v_width(), DType::Bf16)?,
            qkv: room("qkv", shape.gated_qkv_width(), DType::Bf16)?,
            q: room("q", shape.q_width(), DType::Bf16)?,
            attended: room("attended", shape.q_width(), DType::Bf16)?,
            gate_up: room("gate_up", 2 * width, DType::Bf16)?,
            activated: room("activated", width, DType::Bf16)?,
        })
    }

    /// Goes on with `rows` (`[n]` u32) of the residual stream and of the output of full attention.
    pub fn keep_rows(&mut self, exec: &mut Exec, rows: &Tensor) -> Result<(), OpError> {
        let Self { residual, delta, q, attended, .. } = self;
        let kept = rows.elements();
        delta.set_rows(kept);
        q.set_rows(kept);
        ops::gather_rows(exec, residual, rows, delta)?;
        ops::gather_rows(exec, attended, rows, q)?;
        std::mem::swap(residual, delta);
        std::mem::swap(attended, q);
        self.set_rows(kept);
        Ok(())
    }

    pub fn set_rows(&mut self, tokens: usize) {
        let Self { residual, normed, delta, projected, mixed, read, gated, .. } = self;
        for tensor in [residual, normed, delta, projected, mixed, read, gated] {
            tensor.set_rows(tokens);
        }
        let Self { qkv, q, attended, gate_up, activated, .. } = self;
        for tensor in [qkv, q, attended, gate_up, activated] {
            tensor.set_rows(tokens);
        }
    }
}
