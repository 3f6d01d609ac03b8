//! The activations of a step, allocated once for the largest.

use crate::config::Config;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops;

/// Activations, allocated once for the largest step. `tokens` rows, until [`keep_rows`](Self::keep_rows).
#[derive(Debug)]
pub(crate) struct Workspace {
    /// The residual stream, `[tokens, hidden]`.
    pub residual: Tensor,
    /// Its normalised value, input of the projections, `[tokens, hidden]`.
    pub normed: Tensor,
    /// Room for the output of a block before it is added to the residual, `[tokens, hidden]`.
    pub delta: Tensor,
    /// `[tokens, (heads + 2 kv_heads) * head_dim]`.
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
    pub fn new(exec: &mut Exec, config: &Config, tokens: usize) -> std::io::Result<Self> {
        let mut bf16 = |name: &str, width: usize| exec.tensor(name, &[tokens, width], DType::Bf16);
        let (hidden, width, shape) = (config.hidden_size, config.intermediate_size, config.shape);
        Ok(Self {
            residual: bf16("residual", hidden)?,
            normed: bf16("normed", hidden)?,
            delta: bf16("delta", hidden)?,
            qkv: bf16("qkv", shape.qkv_width())?,
            q: bf16("q", shape.q_width())?,
            attended: bf16("attended", shape.q_width())?,
            gate_up: bf16("gate_up", 2 * width)?,
            activated: bf16("activated", width)?,
        })
    }

    /// Goes on with `rows` (`[n]` u32) of the residual stream and of the output of attention.
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
        let Self { residual, normed, delta, qkv, q, attended, gate_up, activated, .. } = self;
        for tensor in [residual, normed, delta, qkv, q, attended, gate_up, activated] {
            tensor.set_rows(tokens);
        }
    }
}
