//! Reads a request body: bounded in size and time.

use super::fields::Fields;
use super::state::ApiOptions;
use super::stream_head::StreamHead;
use crate::error::ApiError;
use crate::metrics::Choices;
use crate::trace::Trace;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use futures_util::StreamExt;
use std::sync::Arc;
use std::time::Instant;
use tokio::time::timeout;

/// Bytes of an oversized body that are read and discarded before the refusal, because many clients read no response before
/// they have sent everything.
const MAX_DISCARD: usize = 64 << 20;

/// What a request has besides its body.
#[derive(Debug, Clone)]
pub struct RequestContext {
    /// Headers of the request.
    pub headers: HeaderMap,
    /// Trace that records the stages of the request.
    pub trace: Option<Arc<Trace>>,
    /// What the choices of the request did, for its log line.
    pub choices: Option<Arc<Choices>>,
    /// When the whole body had arrived.
    pub received: Instant,
    head: Option<StreamHead>,
}

impl RequestContext {
    /// The response will be a stream with this value of `x-ignored-fields`: its head may be sent.
    pub fn announce_stream(&self, ignored: Option<&HeaderValue>) {
        if let Some(head) = &self.head {
            head.announce(self.received, ignored);
        }
    }
}

/// Reads the headers and the body of a JSON request.
pub async fn read(request: Request, options: &ApiOptions) -> Result<(RequestContext, Vec<u8>), ApiError> {
    let (mut parts, body) = request.into_parts();
    let trace: Option<Arc<Trace>> = parts.extensions.remove();
    let content_type = parts.headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or("none");
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        let message =
            format!("Content-Type must be application/json, got {}", crate::error::truncate_for_error(content_type));
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    let bytes = read_bounded(body, &parts.headers, options).await?;
    if let Some(trace) = &trace {
        trace.stage("receive");
    }
    let (choices, head) = (parts.extensions.remove(), parts.extensions.remove());
    Ok((RequestContext { headers: parts.headers, trace, choices, received: Instant::now(), head }, bytes))
}

async fn read_bounded(body: Body, headers: &HeaderMap, options: &ApiOptions) -> Result<Vec<u8>, ApiError> {
    let limit = options.max_body;
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    // A client that sends `Expect: 100-continue` (curl does, for large bodies) is refused immediately.
    if headers.contains_key(header::EXPECT) && announced.is_some_and(|length| length > limit) {
        return Err(too_large(limit));
    }
    let mut frames = body.into_data_stream();
    // It grows as bytes come: what is announced costs the client nothing.
    let mut bytes = Vec::new();
    let mut total = 0;
    while let Some(frame) = timeout(options.client_timeout, frames.next()).await.map_err(|_| too_slow(options))? {
        let frame = frame
            .map_err(|e| ApiError::new(StatusCode::BAD_REQUEST, format!("the request body could not be read: {e}")))?;
        total += frame.len();
        if total <= limit {
            bytes.extend_from_slice(&frame);
        } else if total > MAX_DISCARD {
            break;
        }
    }
    if total > limit { Err(too_large(limit)) } else { Ok(bytes) }
}

fn too_large(limit: usize) -> ApiError {
    let message = format!("the request body is larger than the limit of {limit} bytes (--max-body-size)");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
}

fn too_slow(options: &ApiOptions) -> ApiError {
    let message = format!("no byte of the request body came for {} s", options.client_timeout.as_secs_f64());
    ApiError::new(StatusCode::REQUEST_TIMEOUT, message)
}

/// Parses a body into fields without types.
pub fn fields(bytes: &[u8]) -> Result<Fields, ApiError> {
    super::schema::Body::parse(bytes)?;
    let body = serde_json::from_slice(bytes).map_err(|e| ApiError::invalid("body", e.to_string()))?;
    Ok(Fields::new(body))
}
