//! Outcome of an HTTP request's choices, for its log line.

use crate::error::ApiError;
use axum::http::StatusCode;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Outcome of a request, in ascending order of attention needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// EOS, stop token or stop string.
    Stop,
    /// `max_tokens` or the context length was reached.
    Length,
    /// The client left, or the deadline passed.
    Abort,
    /// The engine failed.
    Error,
}

impl Outcome {
    /// Every one.
    pub const ALL: [Self; 4] = [Self::Stop, Self::Length, Self::Abort, Self::Error];

    /// Value of the label and of the log line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}

/// Results of one request's choices.
#[derive(Debug, Default)]
pub struct Choices {
    summary: Mutex<Summary>,
    failure: OnceLock<Failure>,
}

/// An error inside a stream, after a head with status 200.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// Status that the response would have had.
    pub status: StatusCode,
    /// The error's code, see [`ApiError::reason`].
    pub reason: &'static str,
}

/// Totals of all choices that have ended.
#[derive(Debug, Default, Clone, Copy)]
pub struct Summary {
    /// Number of ended choices.
    pub choices: usize,
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: usize,
    /// Generated tokens.
    pub tokens: usize,
    /// Generated tokens of the longest choice.
    pub longest: usize,
    /// The outcome that needs the most attention.
    pub outcome: Option<Outcome>,
    /// Longest time from submit to admission.
    pub queued: Option<Duration>,
    /// Longest time from submit to the first token.
    pub first_token: Option<Duration>,
    /// Longest mean time per token.
    pub per_token: Option<Duration>,
}

/// Result of one choice.
pub struct ChoiceResult {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: usize,
    /// Generated tokens.
    pub tokens: usize,
    /// Why it ended.
    pub outcome: Outcome,
    /// Time from submit to admission.
    pub queued: Option<Duration>,
    /// Time from submit to the first token.
    pub first_token: Option<Duration>,
    /// Mean time per token after the first.
    pub per_token: Option<Duration>,
}

impl Choices {
    /// Adds a choice that has ended.
    pub fn add(&self, choice: ChoiceResult) {
        let mut all = self.summary.lock().unwrap_or_else(PoisonError::into_inner);
        all.choices += 1;
        all.prompt_tokens += choice.prompt_tokens;
        all.cached_tokens += choice.cached_tokens;
        all.tokens += choice.tokens;
        all.longest = all.longest.max(choice.tokens);
        // The outcome that needs the most attention is the request's.
        all.outcome = all.outcome.max(Some(choice.outcome));
        all.queued = all.queued.max(choice.queued);
        all.first_token = all.first_token.max(choice.first_token);
        all.per_token = all.per_token.max(choice.per_token);
    }

    /// Stores the error that ends the response's stream. Only the first error counts.
    pub fn failed(&self, error: &ApiError) {
        let _ = self.failure.set(Failure { status: error.status(), reason: error.reason() });
    }

    /// The error that ended the response's stream.
    pub fn failure(&self) -> Option<Failure> {
        self.failure.get().copied()
    }

    /// The totals.
    pub fn summary(&self) -> Summary {
        *self.summary.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
