//! Rotary position embeddings of the two kinds of layers.

use crate::config::{Config, LayerKind};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::OpError;
use pegainfer_kernels::ops::Yarn;
use pegainfer_kernels::ops::deepseek_v4::RopeTable;

/// Rotations of the two kinds of layers.
#[derive(Debug)]
pub(crate) struct Rotations {
    /// Rotations of window layers.
    pub window: RopeTable,
    /// Rotations of compressed layers.
    pub compressed: RopeTable,
}

impl Rotations {
    pub fn new(exec: &mut Exec, config: &Config) -> Result<Self, OpError> {
        let yarn = config.yarn;
        let spec = Yarn {
            factor: yarn.factor,
            beta_fast: yarn.beta_fast,
            beta_slow: yarn.beta_slow,
            original_context: yarn.original_context,
            truncate: true,
        };
        Ok(Self {
            window: RopeTable::new(exec, config.rope_dim, config.rope_theta, None)?,
            compressed: RopeTable::new(exec, config.rope_dim, config.compress_rope_theta, Some(spec))?,
        })
    }

    /// Rotations of a layer of this kind.
    pub fn of(&self, kind: LayerKind) -> &RopeTable {
        if kind == LayerKind::Window { &self.window } else { &self.compressed }
    }
}
