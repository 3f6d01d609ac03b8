//! Why a grammar is refused.

use thiserror::Error;

/// Why a source was not compiled; one sentence.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GrammarError {
    /// The source is faulty; the sentence may quote it.
    #[error("{0}")]
    Invalid(String),
    /// The source exceeds a limit, which the sentence names.
    #[error("{0}")]
    Limit(String),
    /// No thread, process or memory is free.
    #[error("{0}")]
    Busy(String),
}

impl GrammarError {
    /// The compiler panicked.
    pub fn panicked() -> Self {
        Self::Invalid("the compiler panicked".into())
    }

    /// The system cannot start a thread.
    pub fn no_thread(error: &std::io::Error) -> Self {
        Self::Busy(format!("no thread can be started to compile it: {error}"))
    }
}
