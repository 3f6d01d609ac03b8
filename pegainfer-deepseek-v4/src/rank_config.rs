//! The model as a type, and the numbers of one of its ranks.

use crate::config::Config;
use crate::numerics::Numerics;
use crate::sharing::Sharing;
use pegainfer_core::parallel::Shard;

/// DeepSeek-V4-Flash.
#[derive(Debug)]
pub struct DeepSeekV4;

/// Options of loading that only this model has.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Roundings of the run.
    pub numerics: Numerics,
    /// Work of prompts that ranks share: [`Sharing::OFFICIAL`], and more in tests of small models.
    pub sharing: Sharing,
}

impl Default for Options {
    /// The precision of DeepSeek's own code.
    fn default() -> Self {
        Self { numerics: Numerics::REFERENCE, sharing: Sharing::OFFICIAL }
    }
}

/// The numbers of a rank.
#[derive(Debug, Clone)]
pub struct RankConfig {
    /// The numbers of the whole model.
    pub model: Config,
    /// How it runs.
    pub options: Options,
    /// The rank.
    pub shard: Shard,
    /// Number of first layers that a step runs: all of them, except in a warm-up.
    pub layers: usize,
}

impl RankConfig {
    /// One rank for the whole model.
    pub fn new(model: Config, options: Options) -> Self {
        Self { layers: model.layers.len(), model, options, shard: Shard::WHOLE }
    }
}
