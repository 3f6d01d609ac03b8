//! Errors of checkpoints.

use crate::tensor::OpError;
use pegainfer_model_files::FilesError;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Reason why a checkpoint cannot be loaded; each message is one sentence for the user.
#[derive(Debug, Error)]
pub enum WeightsError {
    /// A file cannot be opened or mapped.
    #[error("cannot read {}: {error}", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        error: std::io::Error,
    },
    /// The directory has no weights.
    #[error(
        "{} holds no weights: expected model.safetensors, or model.safetensors.index.json and its shards, or a GGUF file",
        dir.display()
    )]
    NoWeights {
        /// Path of the directory.
        dir: PathBuf,
    },
    /// The files of a model in GGUF.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// A shard named in the index does not exist.
    #[error("{} is missing, but the index names it for {tensor}; download the checkpoint again", path.display())]
    MissingShard {
        /// Path of the shard.
        path: PathBuf,
        /// Name of the first tensor that the index assigns to it.
        tensor: String,
    },
    /// The index names a file in another directory.
    #[error("{} names {file:?}, which is not a file of the checkpoint's directory", index.display())]
    NoFileName {
        /// Path of the index.
        index: PathBuf,
        /// The named file.
        file: String,
    },
    /// A safetensors header or the index is not valid.
    #[error("{} is damaged or truncated ({message}); download it again", path.display())]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Description of the error.
        message: String,
    },
    /// A file of git-lfs that names the weights instead of holding them.
    #[error("{} is a pointer of git-lfs, not the weights: run git lfs pull in its directory", path.display())]
    LfsPointer {
        /// Path of the file.
        path: PathBuf,
    },
    /// The model needs a tensor that no file holds.
    #[error("the checkpoint has no tensor {name}; does config.json belong to these weights?")]
    MissingTensor {
        /// Name of the tensor.
        name: String,
    },
    /// A tensor does not fit the config.
    #[error("{name} is {found}, but config.json asks for {expected}; does config.json belong to these weights?")]
    Mismatch {
        /// Name of the tensor.
        name: String,
        /// Dtype and shape in the file.
        found: String,
        /// Dtype and shape that the model needs.
        expected: String,
    },
    /// An FP8 weight without scales, or scales without an FP8 weight.
    #[error("{name} {message}; download the checkpoint again, or choose another")]
    BlockScales {
        /// Name of the tensor.
        name: String,
        /// Description of the error.
        message: String,
    },
    /// Tensors of a quantised weight that contradict each other or hold invalid values.
    #[error("{name} {message}; download the checkpoint again, or choose another")]
    Quantized {
        /// Name of the tensor.
        name: String,
        /// Description of the error.
        message: String,
    },
    /// The device has not enough memory.
    #[error(
        "cannot allocate {bytes} bytes for {name}: {error}; stop what else uses this memory, or choose another --device"
    )]
    OutOfMemory {
        /// Name of the tensor.
        name: String,
        /// Size of the tensor in bytes.
        bytes: u64,
        /// Error of the operating system.
        error: std::io::Error,
    },
    /// The device failed.
    #[error("cannot copy the weights to the device: {0}")]
    Device(#[from] OpError),
}

/// The error of a file that cannot be read.
pub(super) fn io(path: &Path, error: std::io::Error) -> WeightsError {
    WeightsError::Io { path: path.to_owned(), error }
}

/// The error of a file with invalid contents.
pub(super) fn damaged(path: &Path, error: &dyn std::fmt::Display) -> WeightsError {
    WeightsError::Damaged { path: path.to_owned(), message: error.to_string() }
}

/// Adds the tensor's name to `error` if it names only the file or the device.
pub(super) fn named(name: &str, error: WeightsError) -> WeightsError {
    match error {
        WeightsError::Io { path, error } => {
            WeightsError::Io { path, error: std::io::Error::new(error.kind(), format!("{name}: {error}")) }
        }
        error => error,
    }
}
