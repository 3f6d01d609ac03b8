//! Errors in the shape of Anthropic's API.

use crate::error::ApiError;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// An error in Anthropic's shape.
pub struct MessagesError(pub ApiError);

impl MessagesError {
    /// The JSON body.
    pub fn body(error: &ApiError) -> Value {
        let kind = match error.status() {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            StatusCode::GATEWAY_TIMEOUT => "timeout_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        json!({"type": "error", "error": {"type": kind, "message": error.message()}})
    }
}

impl IntoResponse for MessagesError {
    fn into_response(self) -> Response {
        let body = Self::body(&self.0);
        let (mut parts, _) = self.0.into_response().into_parts();
        parts.headers.remove("content-length");
        (parts.status, parts.headers, body.to_string()).into_response()
    }
}
