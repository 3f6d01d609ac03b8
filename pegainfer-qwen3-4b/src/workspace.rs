//! The activations of a step, allocated once for the largest.

use crate::config::Config;
use pegainfer_core::exec::{Exec, Room, turns_bytes};
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::step::keep_rows;

/// Activations, allocated once for the largest step. `tokens` rows, until the last layer narrows them.
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
        let mut hidden = |name: &str| exec.tensor(name, &[tokens, config.hidden_size], DType::Bf16);
        let (residual, normed, delta) = (hidden("residual")?, hidden("normed")?, hidden("delta")?);
        let (attention, mlp) = turns(config, tokens);
        let [qkv, q, attended, gate_up, activated] = exec.in_turns(&[&attention, &mlp])?;
        Ok(Self { residual, normed, delta, qkv, q, attended, gate_up, activated })
    }

    /// Bytes for each token on a GPU.
    pub fn token_bytes(config: &Config) -> u64 {
        let (attention, mlp) = turns(config, 1);
        (3 * config.hidden_size * DType::Bf16.size() + turns_bytes(&[&attention, &mlp])) as u64
    }

    /// Goes on with `rows` (`[n]` u32) of the residual stream and of the queries, before attention.
    pub fn keep_queries(&mut self, exec: &mut Exec, rows: &Tensor) -> Result<(), OpError> {
        let Self { residual, delta, q, attended, .. } = self;
        keep_rows(exec, rows, [(residual, delta), (q, attended)])?;
        self.set_rows(rows.elements());
        Ok(())
    }

    /// Goes on with `rows` (`[n]` u32) of the residual stream and of the output of attention.
    pub fn keep_outputs(&mut self, exec: &mut Exec, rows: &Tensor) -> Result<(), OpError> {
        let Self { residual, delta, q, attended, .. } = self;
        keep_rows(exec, rows, [(residual, delta), (attended, q)])?;
        self.set_rows(rows.elements());
        Ok(())
    }

    pub fn set_rows(&mut self, tokens: usize) {
        let Self { residual, normed, delta, qkv, q, attended, gate_up, activated, .. } = self;
        for tensor in [residual, normed, delta, qkv, q, attended, gate_up, activated] {
            tensor.set_rows(tokens);
        }
    }
}

/// What attention has for `tokens` tokens, and what the MLP has.
fn turns(config: &Config, tokens: usize) -> ([Room<'static>; 3], [Room<'static>; 2]) {
    let (shape, width) = (config.shape, config.intermediate_size);
    let bf16 = |name, width| (name, [tokens, width], DType::Bf16);
    (
        [bf16("qkv", shape.qkv_width()), bf16("q", shape.q_width()), bf16("attended", shape.q_width())],
        [bf16("gate_up", 2 * width), bf16("activated", width)],
    )
}
