//! Errors of a model's files.

use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why a model's files cannot be used; each message is one sentence for the user.
#[derive(Debug, Error)]
pub enum FilesError {
    /// A file cannot be opened or read.
    #[error("cannot read {}: {error}", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        error: std::io::Error,
    },
    /// A GGUF file breaks the format.
    #[error("{} is damaged or truncated ({message}); download it again", path.display())]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Description of the error.
        message: String,
    },
    /// A valid GGUF file of something that is not served.
    #[error("{} is not served: {message}", path.display())]
    Unsupported {
        /// Path of the file.
        path: PathBuf,
        /// What it holds, and what is served.
        message: String,
    },
    /// A folder with several models in GGUF.
    #[error("{} holds several GGUF models: give the path of one, for example {}", dir.display(), files.join(" or "))]
    Several {
        /// The folder.
        dir: PathBuf,
        /// Names of the first file of each model.
        files: Vec<String>,
    },
}

impl FilesError {
    pub(crate) fn io(path: &Path, error: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), error }
    }

    pub(crate) fn damaged(path: &Path, message: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_owned(), message: message.into() }
    }

    pub(crate) fn unsupported(path: &Path, message: impl Into<String>) -> Self {
        Self::Unsupported { path: path.to_owned(), message: message.into() }
    }
}
