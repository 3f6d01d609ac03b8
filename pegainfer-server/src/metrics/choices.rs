//! What the choices of one HTTP request did, for its log line.

use crate::error::ApiError;
use axum::http::StatusCode;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Outcome of a request. Those that need more attention are greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// EOS, stop token or stop string.
    Stop,
    /// `max_tokens` or the context length was reached.
    Length,
    /// The client went away, or the deadline passed.
    Abort,
    /// The engine failed.
    Error,
}

impl Outcome {
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

/// What the choices of one request did.
#[derive(Debug, Default)]
pub struct Choices {
    summary: Mutex<Summary>,
    failure: OnceLock<Failure>,
}

/// An error that a client got inside a stream, after a head with status 200.
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
    /// Choices that have ended.
    pub choices: usize,
    /// Tokens of the prompts.
    pub prompt_tokens: usize,
    /// Those of them found in the prefix cache.
    pub cached_tokens: usize,
    /// Generated tokens.
    pub tokens: usize,
    /// Generated tokens of the longest choice.
    pub longest: usize,
    /// The outcome that needs attention most.
    pub outcome: Option<Outcome>,
    /// Longest time from submit to admission.
    pub queued: Option<Duration>,
    /// Longest time from submit to the first token.
    pub first_token: Option<Duration>,
    /// Longest mean time per token.
    pub per_token: Option<Duration>,
}

/// What one choice did.
pub struct Choice {
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Those of them found in the prefix cache.
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
    pub fn add(&self, choice: Choice) {
        let mut all = self.summary.lock().unwrap_or_else(PoisonError::into_inner);
        all.choices += 1;
        all.prompt_tokens += choice.prompt_tokens;
        all.cached_tokens += choice.cached_tokens;
        all.tokens += choice.tokens;
        all.longest = all.longest.max(choice.tokens);
        // The outcome that needs attention most is the request's.
        all.outcome = all.outcome.max(Some(choice.outcome));
        all.queued = all.queued.max(choice.queued);
        all.first_token = all.first_token.max(choice.first_token);
        all.per_token = all.per_token.max(choice.per_token);
    }

    /// Notes that the response's stream ends with this error. The first error counts.
    pub fn failed(&self, error: &ApiError) {
        let _ = self.failure.set(Failure { status: error.status(), reason: error.reason() });
    }

    /// The error that the response's stream ended with.
    pub fn failure(&self) -> Option<Failure> {
        self.failure.get().copied()
    }

    /// The totals.
    pub fn summary(&self) -> Summary {
        *self.summary.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
