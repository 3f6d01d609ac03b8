//! The activations of a step, allocated once for the largest.

use crate::config::Config;
use pegainfer_core::exec::{AliasedTensor, Exec};
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops;
use pegainfer_kernels::runtime::{Activations, StepSize, gather_rows};

/// Activations of a step, bf16, of `tokens` rows until the last layer gathers the sampled ones.
#[derive(Debug)]
pub struct Workspace {
    /// Rotary angles, see [`ops::rope_table`]; written when it is allocated.
    pub rope: Tensor,
    /// The residual stream and the MLP's.
    pub activations: Activations,
    /// `[tokens, (heads + 2 kv_heads) * head_dim]`.
    pub qkv: Tensor,
    /// `[tokens, heads * head_dim]`.
    pub q: Tensor,
    /// `[tokens, heads * head_dim]`.
    pub attended: Tensor,
}

impl Workspace {
    pub(crate) fn new(exec: &mut Exec, config: &Config, size: StepSize) -> std::io::Result<Self> {
        let rope = ops::rope_table(exec, size.context, config.shape.head_dim, config.rope)?;
        let attention = attention_scratch(config, size.tokens);
        let widths = (config.hidden_size, config.intermediate_size);
        let (activations, [qkv, q, attended]) = Activations::new(exec, widths, size.tokens, &[&attention])?;
        Ok(Self { rope, activations, qkv, q, attended })
    }

    /// Bytes for each token on a GPU.
    pub(crate) fn bytes_per_token(config: &Config) -> u64 {
        let widths = (config.hidden_size, config.intermediate_size);
        Activations::bytes_per_token(widths, &[&attention_scratch(config, 1)])
    }

    /// Goes on with `rows` (`[n]` u32) of the residual stream and of the queries, before attention.
    pub(crate) fn gather_queries(&mut self, exec: &mut Exec, rows: &Tensor) -> Result<(), OpError> {
        let Self { activations: Activations { residual, delta, .. }, q, attended, .. } = self;
        attended.set_dtype(DType::Bf16);
        gather_rows(exec, rows, [(residual, delta), (q, attended)])?;
        self.set_rows(rows.elements());
        Ok(())
    }

    /// Goes on with `rows` (`[n]` u32) of the residual stream and of the output of attention.
    pub(crate) fn gather_outputs(&mut self, exec: &mut Exec, rows: &Tensor) -> Result<(), OpError> {
        let Self { activations: Activations { residual, delta, .. }, q, attended, .. } = self;
        gather_rows(exec, rows, [(residual, delta), (attended, q)])?;
        self.set_rows(rows.elements());
        Ok(())
    }

    pub(crate) fn set_rows(&mut self, tokens: usize) {
        let Self { activations, qkv, q, attended, .. } = self;
        activations.set_rows(tokens);
        for tensor in [qkv, q, attended] {
            tensor.set_rows(tokens);
        }
        attended.set_dtype(DType::Bf16);
    }
}

fn attention_scratch(config: &Config, tokens: usize) -> [AliasedTensor<'static>; 3] {
    let bf16 = |name, width| (name, [tokens, width], DType::Bf16);
    let shape = config.shape;
    [bf16("qkv", shape.qkv_width()), bf16("q", shape.q_width()), bf16("attended", shape.q_width())]
}
