//! Errors as gRPC statuses.
//!
//! The status of a call is in the trailers behind its last message. A call without any message has it in its head.

use crate::error::ApiError;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;

/// Content type of requests and responses.
pub const CONTENT_TYPE: &str = "application/grpc";
/// Trailer with the number of the status.
pub const STATUS: HeaderName = HeaderName::from_static("grpc-status");
/// Trailer with the error's sentence.
pub const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// HTTP status of a call that was cancelled by `Abort`, as nginx logs it for clients that left.
pub const CANCELLED: u16 = 499;

/// Statuses of gRPC that this server sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// Success.
    Ok = 0,
    /// The client cancelled the call.
    Cancelled = 1,
    /// A field is wrong.
    InvalidArgument = 3,
    /// The time limit has passed.
    DeadlineExceeded = 4,
    /// There is no such model or adapter.
    NotFound = 5,
    /// Needs an admin key, or another one.
    PermissionDenied = 7,
    /// A limit is reached.
    ResourceExhausted = 8,
    /// The state of the model does not allow it.
    FailedPrecondition = 9,
    /// Not served by this server.
    Unimplemented = 12,
    /// A failure of the server.
    Internal = 13,
    /// The server has too much to do, or stops.
    Unavailable = 14,
    /// No valid key.
    Unauthenticated = 16,
}

impl Code {
    /// The code of an error with this HTTP status.
    pub fn from_http(status: StatusCode) -> Self {
        match status.as_u16() {
            200..=299 => Self::Ok,
            401 => Self::Unauthenticated,
            403 => Self::PermissionDenied,
            404 => Self::NotFound,
            408 | 504 => Self::DeadlineExceeded,
            409 => Self::FailedPrecondition,
            413 | 429 => Self::ResourceExhausted,
            CANCELLED => Self::Cancelled,
            405 | 501 => Self::Unimplemented,
            503 => Self::Unavailable,
            400..=499 => Self::InvalidArgument,
            _ => Self::Internal,
        }
    }
}

/// The trailers of a call that failed, or succeeded.
pub fn trailers(error: Option<&ApiError>) -> HeaderMap {
    let code = error.map_or(Code::Ok, |error| Code::from_http(error.status()));
    let mut trailers = HeaderMap::from_iter([(STATUS, HeaderValue::from(code as u16))]);
    if let Some(message) = error.and_then(|error| HeaderValue::try_from(percent_encode(error.message())).ok()) {
        trailers.insert(MESSAGE, message);
    }
    trailers
}

/// The whole response to a call that failed before its first message. It keeps the error, for the middleware.
pub fn refusal(error: &ApiError) -> Response {
    let mut response = Response::new(Body::empty());
    *response.headers_mut() = trailers(Some(error));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE));
    response.extensions_mut().insert(error.clone());
    response
}

/// True for the content types of gRPC with protobuf messages.
pub fn is_content_type(value: &str) -> bool {
    let essence = value.split(';').next().unwrap_or_default().trim();
    [CONTENT_TYPE, "application/grpc+proto"].iter().any(|known| essence.eq_ignore_ascii_case(known))
}

/// A message as the value of [`MESSAGE`]: bytes other than printable ASCII, and `%`, become `%XX`.
fn percent_encode(message: &str) -> String {
    let mut encoded = String::with_capacity(message.len());
    for byte in message.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => encoded.push(byte.into()),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_has_a_code() {
        for (status, code) in [
            (400, Code::InvalidArgument),
            (401, Code::Unauthenticated),
            (403, Code::PermissionDenied),
            (404, Code::NotFound),
            (408, Code::DeadlineExceeded),
            (409, Code::FailedPrecondition),
            (413, Code::ResourceExhausted),
            (415, Code::InvalidArgument),
            (429, Code::ResourceExhausted),
            (499, Code::Cancelled),
            (500, Code::Internal),
            (501, Code::Unimplemented),
            (503, Code::Unavailable),
            (504, Code::DeadlineExceeded),
        ] {
            let error = ApiError::new(StatusCode::from_u16(status).unwrap(), "100 % größer\n");
            let trailers = trailers(Some(&error));
            assert_eq!(trailers[STATUS], (code as u16).to_string(), "{status}");
            assert_eq!(trailers[MESSAGE], "100 %25 gr%C3%B6%C3%9Fer%0A");
        }
        assert_eq!(trailers(None)[STATUS], "0");
    }

    #[test]
    fn content_types() {
        for good in ["application/grpc", "Application/gRPC+proto", "application/grpc; charset=utf-8"] {
            assert!(is_content_type(good), "{good}");
        }
        for bad in ["", "application/json", "application/grpc+json", "application/grpc-web"] {
            assert!(!is_content_type(bad), "{bad}");
        }
    }
}
