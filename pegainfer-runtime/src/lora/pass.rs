//! The adapters of a step in a forward pass.

use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_kernels::ops::lora::{AdapterMatrices, add_adapters};
use pegainfer_kernels::ops::{self, Matrix};

/// A projection of a layer; see [`LayerSources`](crate::LayerSources).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Projection {
    /// Input of the token mixer.
    Input,
    /// Output of the token mixer.
    Output,
    /// Gate and up of a dense MLP.
    GateUp,
    /// Down of a dense MLP.
    Down,
}

/// The adapters of a step's tokens, in a pass over the model's layers.
#[derive(Debug)]
pub struct Adapters<'a> {
    layers: &'a [[Option<AdapterMatrices>; 4]],
    /// Slots of all tokens, and of the sampled ones.
    slots: (&'a Tensor, &'a Tensor),
    layer: usize,
    gathered: bool,
}

/// `out = x · wᵀ`, `[rows, n]` bf16, where `x` is `[rows, k]` and `w` the model's matrix of the projection `at`, and the
/// part that adapters add to it.
pub fn adapted_linear(
    exec: &mut Exec,
    (x, w): (&Tensor, &Matrix),
    at: Projection,
    adapters: Option<&mut Adapters<'_>>,
    out: &mut Tensor,
) -> Result<(), OpError> {
    ops::linear(exec, x, w, out)?;
    match adapters {
        None => Ok(()),
        Some(adapters) => adapters.add(exec, at, x, out),
    }
}

impl<'a> Adapters<'a> {
    pub(super) fn new(layers: &'a [[Option<AdapterMatrices>; 4]], slots: (&'a Tensor, &'a Tensor)) -> Self {
        Self { layers, slots, layer: 0, gathered: false }
    }

    /// The adapters of a pass, if it has any, for its layer number `layer`.
    pub fn of_layer(adapters: &mut Option<Self>, layer: usize) -> Option<&mut Self> {
        let adapters = adapters.as_mut()?;
        adapters.layer = layer;
        Some(adapters)
    }

    /// The sampled rows of all activations were gathered: later inputs have a row for each sampled token.
    pub fn gather(&mut self) {
        self.gathered = true;
    }

    /// Adds the adapters' part of a projection of the layer to `out`, `[rows, n]` bf16, the output of the GEMM of `x`,
    /// `[rows, k]` bf16, and the model's matrix.
    fn add(&mut self, exec: &mut Exec, at: Projection, x: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
        let Some(matrices) = &self.layers[self.layer][at as usize] else { return Ok(()) };
        let slots = if self.gathered { self.slots.1 } else { self.slots.0 };
        add_adapters(exec, x, matrices, slots, out)
    }
}
