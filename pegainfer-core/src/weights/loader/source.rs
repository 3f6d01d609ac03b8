//! The source of weights: a checkpoint, or a seed of dummy weights.

use crate::exec::Exec;
use crate::tensor::{OpError, Tensor};
use crate::weights::checkpoint::Checkpoint;
use crate::weights::error::WeightsError;
use std::path::Path;

/// An op that fills a tensor with the values of [`uniform`](crate::weights::uniform) for this seed and limit, on its device.
pub type Uniform = fn(&mut Exec, seed: u64, limit: f32, out: &mut Tensor) -> Result<(), OpError>;

/// An op that fills a tensor of u8 with the bytes of [`random_bytes`](crate::weights::random_bytes) for this seed and
/// mask, on its device.
pub type RandomBytes = fn(&mut Exec, seed: u64, mask: u8, out: &mut Tensor) -> Result<(), OpError>;

/// Source of weights.
#[derive(Debug)]
pub enum Source {
    /// Files of a checkpoint.
    Checkpoint(Checkpoint),
    /// Seeded random values: norm weights are 1, all others uniform with this standard deviation.
    Dummy {
        /// Seed of the dummy weights.
        seed: u64,
        /// Standard deviation: `initializer_range` of the config.
        std: f32,
        /// The op that generates the values.
        uniform: Uniform,
        /// The op that generates the codes of group-quantised weights.
        random_bytes: RandomBytes,
    },
}

impl Source {
    /// Opens the checkpoint in `dir`.
    pub fn open(dir: &Path) -> Result<Self, WeightsError> {
        Checkpoint::open(dir).map(Self::Checkpoint)
    }

    /// Names of all tensors, in any order; none for dummy weights.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let checkpoint = match self {
            Self::Checkpoint(checkpoint) => Some(checkpoint),
            Self::Dummy { .. } => None,
        };
        checkpoint.into_iter().flat_map(Checkpoint::names)
    }

    /// True if the source has this tensor.
    pub fn contains(&self, name: &str) -> bool {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.contains(name),
            Self::Dummy { .. } => true,
        }
    }
}
