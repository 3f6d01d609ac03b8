//! The deadline of a request: from its head to the head of its response, whatever the server does in between.

use crate::error::ApiError;
use crate::lifecycle::Deadline;
use axum::extract::Request;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use pegainfer_terminal::values::parse_seconds;
use std::time::Duration;

/// Header with the client's own time limit in seconds.
const HEADER: &str = "x-request-timeout";

/// Middleware: 504 when the time limit of the server or the client passes before the response begins, which drops the work
/// for it. The deadline goes with the request, for the part of the work that the response continues.
pub async fn enforce(
    limit: Option<Duration>,
    mut request: Request,
    next: impl AsyncFnOnce(Request) -> Response,
) -> Response {
    let deadline = match of(request.headers(), limit) {
        Ok(Some(deadline)) => deadline,
        Ok(None) => return next(request).await,
        Err(error) => return error.into_response(),
    };
    request.extensions_mut().insert(deadline);
    tokio::select! {
        biased;
        response = next(request) => response,
        () = tokio::time::sleep_until(deadline.at.into()) => deadline.error().into_response(),
    }
}

/// The server's time limit, or the client's if that is shorter.
fn of(headers: &HeaderMap, limit: Option<Duration>) -> Result<Option<Deadline>, ApiError> {
    let asked = match headers.get(HEADER) {
        None => None,
        Some(value) => {
            let seconds = parse_seconds(value.to_str().unwrap_or_default());
            Some(seconds.map_err(|e| ApiError::invalid(HEADER, format!("{HEADER}: {e}")))?)
        }
    };
    Ok(asked.into_iter().chain(limit).min().map(Deadline::after))
}
