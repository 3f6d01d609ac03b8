//! Why an engine cannot be loaded.

use crate::config::ConfigError;
use pegainfer_core::tensor::OpError;
use pegainfer_core::weights::WeightsError;
use thiserror::Error;

/// Why an engine cannot be loaded; one sentence for the user.
#[derive(Debug, Error)]
pub enum LoadError {
    /// config.json.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The weights.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// An option does not fit the model or another option.
    #[error("{0}")]
    Option(String),
    /// An op refused the configuration.
    #[error("the model cannot run: {0}")]
    Op(#[from] OpError),
    /// Slots and pages.
    #[error("cannot allocate the KV cache: {0}; lower --kv-cache-memory or --max-num-seqs")]
    State(std::io::Error),
    /// The workspace.
    #[error("cannot allocate the activations: {0}; lower --max-num-batched-tokens or --max-num-seqs")]
    Workspace(#[from] std::io::Error),
}
