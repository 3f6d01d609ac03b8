//! Gives errors the shape of the called API, whichever layer refused the request.

use crate::api_style::ApiStyle;
use crate::error::ApiError;
use crate::ids;
use axum::extract::Request;
use axum::http::header;
use axum::response::Response;

/// Middleware: gives errors the shape of the route's API. It wraps all middleware that refuses requests, inside the
/// middleware that attaches the id.
pub async fn reshape(request: Request, next: impl AsyncFnOnce(Request) -> Response) -> Response {
    let style = ApiStyle::of(request.extensions());
    if !style.reshapes_errors() {
        return next(request).await;
    }
    let id = request.headers().get(ids::HEADER).and_then(|id| id.to_str().ok()).unwrap_or_default().to_string();
    let mut response = next(request).await;
    if let Some(body) = response.extensions().get::<ApiError>().and_then(|error| style.error_body(error, &id)) {
        response.headers_mut().remove(header::CONTENT_LENGTH);
        *response.body_mut() = body.into();
    }
    response
}
