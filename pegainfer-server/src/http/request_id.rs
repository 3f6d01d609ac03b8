//! Request ids: one id in the response's header, its body and the log.

use crate::api_style::ApiStyle;
use crate::error::ApiError;
use crate::ids::{HEADER, request_id};
use axum::extract::Request;
use axum::http::HeaderValue;
use axum::response::{IntoResponse, Response};

/// Middleware: replaces the request's id header by a valid one, and copies it to the response.
pub async fn attach(mut request: Request, next: impl AsyncFnOnce(Request) -> Response) -> Response {
    let id = match request_id(request.headers()) {
        Ok(id) => id,
        Err(error) => return error.into_response(),
    };
    let Ok(value) = HeaderValue::try_from(id) else {
        return ApiError::internal("the request id is not a header value").into_response();
    };
    request.headers_mut().insert(HEADER, value.clone());
    let also = ApiStyle::of(request.extensions()).id_header();
    let mut response = next(request).await;
    if let Some(also) = also {
        response.headers_mut().insert(also, value.clone());
    }
    response.headers_mut().insert(HEADER, value);
    response
}
