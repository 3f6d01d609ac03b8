//! Errors take the shape of the API that was called, whichever layer refused the request.

use crate::error::{ApiError, is_anthropic};
use crate::ids;
use axum::extract::Request;
use axum::http::header;
use axum::response::Response;

/// Middleware: gives errors on Anthropic's paths their shape. It runs outside of all that refuses requests, and inside of the one
/// that attaches the request's id.
pub async fn reshape(request: Request, next: impl AsyncFnOnce(Request) -> Response) -> Response {
    if !is_anthropic(request.uri().path()) {
        return next(request).await;
    }
    let id = request.headers().get(ids::HEADER).and_then(|id| id.to_str().ok()).unwrap_or_default().to_string();
    let mut response = next(request).await;
    if let Some(error) = response.extensions().get::<ApiError>() {
        let mut body = error.anthropic_body();
        body["request_id"] = id.into();
        response.headers_mut().remove(header::CONTENT_LENGTH);
        *response.body_mut() = body.to_string().into();
    }
    response
}
