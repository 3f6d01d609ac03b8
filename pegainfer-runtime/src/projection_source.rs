//! Where the rows of a fused projection are in a checkpoint.

use pegainfer_core::weights::{Columns, SourceTensor};

/// Matrices of the checkpoint that are stacked to one projection, and the columns that the rank holds.
#[derive(Debug, Clone)]
pub struct ProjectionSource {
    /// Rows of each, in the order in which they are stacked.
    pub parts: Vec<SourceTensor>,
    /// Columns of all.
    pub columns: Columns,
}

/// The projections of a layer that adapters may change; `None` for those that they may not.
#[derive(Debug, Clone, Default)]
pub struct LayerSources {
    /// Input of the token mixer, which reads the normalised residual stream.
    pub input: Option<ProjectionSource>,
    /// Output of the token mixer.
    pub output: Option<ProjectionSource>,
    /// Gate and up of a dense MLP.
    pub gate_up: Option<ProjectionSource>,
    /// Down of a dense MLP.
    pub down: Option<ProjectionSource>,
}

impl LayerSources {
    /// All four, in order.
    pub fn all(&self) -> [Option<&ProjectionSource>; 4] {
        [&self.input, &self.output, &self.gate_up, &self.down].map(Option::as_ref)
    }
}
