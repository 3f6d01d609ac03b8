//! Gives errors the shape of the called API, whichever layer refused the request.

use crate::api_style::ApiStyle;
use crate::error::ApiError;
use crate::grpc_status;
use crate::ids;
use axum::extract::Request;
use axum::http::header;
use axum::response::Response;

/// True for requests with the content type of gRPC.
fn is_call(request: &Request) -> bool {
    let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    content_type.is_some_and(grpc_status::is_content_type)
}

/// Middleware: gives errors the shape of the route's API. It wraps all middleware that refuses requests, inside the
/// middleware that attaches the id.
pub async fn reshape(request: Request, next: impl AsyncFnOnce(Request) -> Response) -> Response {
    let style = ApiStyle::of(request.extensions());
    if style == ApiStyle::Grpc && !is_call(&request) {
        // A browser or curl: it gets an HTTP status.
        return next(request).await;
    }
    if !style.reshapes_errors() {
        return next(request).await;
    }
    let id = request.headers().get(ids::HEADER).and_then(|id| id.to_str().ok()).unwrap_or_default().to_string();
    let response = next(request).await;
    match response.extensions().get::<ApiError>().cloned() {
        Some(error) => style.reshape(&error, response, &id),
        None => response,
    }
}
