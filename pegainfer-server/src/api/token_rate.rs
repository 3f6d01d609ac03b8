//! Refusals of requests that exceed their key's token rate.

use super::state::AppState;
use crate::error::ApiError;
use crate::rates::RateExceeded;
use axum::http::StatusCode;

/// 429: the key has too few tokens left.
pub fn too_many(exceeded: &RateExceeded, state: &AppState) -> ApiError {
    state.metrics.rejected(exceeded.rejection);
    let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, exceeded.to_string()).with_code("rate_limit_exceeded");
    error.with_retry_after(exceeded.seconds())
}
