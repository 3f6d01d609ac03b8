//! Why an engine cannot be loaded.

use super::config_file::ConfigError;
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
    /// A weight is NaN or infinite, or so large that the computation overflows.
    #[error("the model computes NaN logits: its weights are damaged; download the checkpoint again")]
    NotFinite,
    /// An end-of-text id that the vocabulary does not have.
    #[error("eos_token_id {id} is not below vocab_size {vocab_size}: correct generation_config.json or config.json")]
    Eos {
        /// The id.
        id: u32,
        /// Token ids are below this.
        vocab_size: usize,
    },
    /// An option does not fit the model or another option.
    #[error("{0}")]
    Option(String),
    /// An op refused the configuration.
    #[error("the model cannot run: {0}")]
    Op(#[from] OpError),
    /// The KV pool or the state slots cannot be allocated.
    #[error(
        "cannot allocate the KV cache: {0}; lower --kv-cache-memory, --gpu-memory-utilization, --state-cache-memory or \
         --max-num-seqs"
    )]
    State(std::io::Error),
    /// The workspace.
    #[error("cannot allocate the activations: {0}; lower --max-num-batched-tokens or --max-num-seqs")]
    Workspace(#[from] std::io::Error),
}
