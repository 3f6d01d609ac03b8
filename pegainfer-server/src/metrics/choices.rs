//! Outcome of an HTTP request's choices, for its log line.

use super::model::ModelMetrics;
use super::outcome::Outcome;
use crate::error::ApiError;
use axum::http::StatusCode;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Results of one request's choices.
#[derive(Default)]
pub struct Choices {
    summary: Mutex<Summary>,
    failure: OnceLock<Failure>,
    model: OnceLock<Arc<ModelMetrics>>,
}

impl fmt::Debug for Choices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Choices").field("summary", &self.summary()).finish_non_exhaustive()
    }
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
    /// Sets the model of the request.
    pub fn runs_on(&self, model: &Arc<ModelMetrics>) {
        // All choices of a request have the same model.
        let _ = self.model.set(model.clone());
    }

    /// The model that has the request.
    pub fn model(&self) -> Option<&ModelMetrics> {
        self.model.get().map(AsRef::as_ref)
    }

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
