//! Errors of headers.

use thiserror::Error;

/// Why a header cannot be read.
#[derive(Debug, Error)]
pub enum HeaderError {
    /// The input ended or failed.
    #[error("{0}")]
    Io(std::io::Error),
    /// The header breaks the format.
    #[error("{0}")]
    Invalid(String),
    /// A valid header of another version.
    #[error("{0}")]
    Unsupported(String),
}

impl HeaderError {
    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::Invalid(message.into())
    }
}
