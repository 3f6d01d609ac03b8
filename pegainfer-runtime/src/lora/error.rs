//! Why an adapter cannot be loaded.

use pegainfer_core::weights::WeightsError;
use std::path::PathBuf;
use thiserror::Error;

/// Why an adapter cannot be loaded; each message is one sentence for the user.
#[derive(Debug, Error)]
pub enum AdapterError {
    /// There is no configuration.
    #[error("{} does not exist: an adapter is a folder with adapter_config.json and adapter_model.safetensors", path.display())]
    NoConfig {
        /// Path of the file.
        path: PathBuf,
    },
    /// There are no weights in safetensors.
    #[error(
        "{} does not exist: save the adapter with save_pretrained(safe_serialization=True); pickle files such as \
         adapter_model.bin are never opened",
        path.display()
    )]
    NoWeights {
        /// Path of the file.
        path: PathBuf,
    },
    /// A field of the configuration.
    #[error("adapter_config.json: {field} {message}")]
    Field {
        /// Name of the field.
        field: String,
        /// What is wrong with it.
        message: String,
    },
    /// A tensor of the file.
    #[error("the adapter's tensor {tensor} {message}")]
    Tensor {
        /// Name of the tensor.
        tensor: String,
        /// What is wrong with it.
        message: String,
    },
    /// The file of the weights.
    #[error(transparent)]
    Weights(#[from] WeightsError),
}

impl AdapterError {
    pub(super) fn field(field: &str, message: impl Into<String>) -> Self {
        Self::Field { field: field.to_owned(), message: message.into() }
    }

    pub(super) fn tensor(tensor: &str, message: impl Into<String>) -> Self {
        Self::Tensor { tensor: tensor.to_owned(), message: message.into() }
    }
}
