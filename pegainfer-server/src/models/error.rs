//! Why a model cannot be used.

use thiserror::Error;

/// Why a model cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LoadError {
    /// Loading failed.
    #[error("{0}")]
    Failed(String),
    /// It can never fit the memory for models.
    #[error("{0}")]
    TooLarge(String),
    /// Other models take the memory, and requests run on them.
    #[error("{0}; try again later")]
    Busy(String),
    /// It may not leave.
    #[error("{0}")]
    Refused(String),
}

impl LoadError {
    /// The loading thread ended early.
    pub(super) fn stopped() -> Self {
        Self::Failed("the thread that loads the model has ended; the server's log has the details".to_owned())
    }
}
