//! Errors of chat templates.

use pegainfer_model_files::FilesError;
use std::path::PathBuf;
use thiserror::Error;

/// Why there is no usable template, or no prompt.
#[derive(Debug, Error)]
pub enum TemplateError {
    /// A file could not be read or parsed.
    #[error("{path}: {reason}")]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Why the file is unusable.
        reason: String,
    },
    /// The files of a model in GGUF.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// The template refused the conversation with `raise_exception`.
    #[error("the chat template refuses these messages: {0}")]
    Refused(String),
    /// The template failed on this conversation.
    #[error("the chat template cannot render these messages: {0}")]
    Render(String),
}
