//! Messages in the bodies of HTTP/2.
//!
//! A message is preceded by a byte of flags, 0 if it is not compressed, and its length in four bytes.

use super::fields::Fields;
use crate::api::body::{self, RequestContext};
use crate::api::large_response::Unsent;
use crate::api::state::AppState;
use crate::error::{ApiError, truncate_for_error};
use crate::grpc_status;
use crate::output::ResponseShare;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use http_body_util::BodyExt;
use prost::Message;
use std::future::ready;

/// Bytes before a message.
const PREFIX: usize = 5;
/// Maximum number of unknown fields that are named.
const MAX_UNKNOWN: usize = 32;

/// A call: its context, its message, and the value of `x-ignored-fields`.
pub struct Call<M> {
    /// Everything of the request except its body.
    pub context: RequestContext,
    /// The message.
    pub message: M,
    /// Names of fields that have no effect.
    pub unknown: Vec<String>,
}

/// Reads the message of a call. `fields` are those that this server knows.
pub async fn read<M: Message + Default + 'static>(
    request: Request,
    state: &AppState,
    fields: &'static Fields,
) -> Result<Call<M>, ApiError> {
    check_headers(request.headers())?;
    let count = |bytes: &[u8], _| fields.values(bytes.get(PREFIX..).unwrap_or_default());
    let (context, body) = body::read_counted(request, state, count).await?;
    let decode = move |bytes: &[u8]| {
        let bytes = unframe(bytes)?;
        let invalid = |error| ApiError::new(StatusCode::BAD_REQUEST, format!("the message cannot be decoded: {error}"));
        Ok((M::decode(bytes).map_err(invalid)?, fields.unknown(bytes, MAX_UNKNOWN)))
    };
    let (message, unknown) = body.parse(state, decode).await?;
    Ok(Call { context, message, unknown })
}

fn check_headers(headers: &HeaderMap) -> Result<(), ApiError> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let content_type = text("content-type").unwrap_or("none");
    if !grpc_status::is_content_type(content_type) {
        let got = truncate_for_error(content_type);
        let message = format!("Content-Type must be {}, got {got}", grpc_status::CONTENT_TYPE);
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    match text("grpc-encoding") {
        None | Some("identity") => Ok(()),
        Some(other) => {
            let message = format!("messages may not be compressed, got grpc-encoding {}", truncate_for_error(other));
            Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, message))
        }
    }
}

/// The message of a body with exactly one.
fn unframe(body: &[u8]) -> Result<&[u8], ApiError> {
    let bad = |message: &str| ApiError::new(StatusCode::BAD_REQUEST, message);
    let Some((&[flags, a, b, c, d], message)) = body.split_first_chunk::<PREFIX>() else {
        return Err(bad("the call has no message"));
    };
    let length = u32::from_be_bytes([a, b, c, d]) as usize;
    match (flags, message.len()) {
        (0, sent) if sent == length => Ok(message),
        (0, sent) if sent < length => Err(bad("the message is shorter than its announced length")),
        (0, _) => Err(bad("the call has more than one message")),
        _ => Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, "messages may not be compressed")),
    }
}

/// Appends a message with its prefix.
pub fn push(out: &mut Vec<u8>, message: &impl Message) {
    let length = message.encoded_len();
    out.reserve(PREFIX + length);
    out.push(0);
    // A response is limited to far less than 4 GiB by --max-response-bytes.
    out.extend((length as u32).to_be_bytes());
    // Writing to memory cannot fail.
    let _ = message.encode(out);
}

/// The response with one small message.
pub fn reply(message: &impl Message) -> Response {
    let mut bytes = Vec::new();
    push(&mut bytes, message);
    reply_bytes(bytes, ResponseShare::default())
}

/// The response with one message, in bytes with its prefix, and their share of the output budget.
pub fn reply_bytes(message: Vec<u8>, share: ResponseShare) -> Response {
    let body = Unsent::new(message, share).with_trailers(ready(Some(Ok(grpc_status::trailers(None)))));
    let mut response = Response::new(Body::new(body));
    add_headers(response.headers_mut());
    response
}

/// Adds the headers of a response with messages.
pub fn add_headers(headers: &mut HeaderMap) {
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(grpc_status::CONTENT_TYPE));
}

#[cfg(test)]
mod tests {
    use super::*;
    use vllm_proto::AbortRequest;

    #[test]
    fn a_call_has_exactly_one_message() {
        let mut body = Vec::new();
        push(&mut body, &AbortRequest { request_ids: vec!["a".into()] });
        assert_eq!(AbortRequest::decode(unframe(&body).unwrap()).unwrap().request_ids, ["a"]);
        let refusal = |body: &[u8]| unframe(body).unwrap_err().message().to_owned();
        assert!(refusal(&body[..4]).contains("no message"));
        assert!(refusal(&body[..6]).contains("shorter"));
        assert!(refusal(&[&*body, &*body].concat()).contains("more than one"));
        body[0] = 1;
        assert!(refusal(&body).contains("compressed"));
    }
}
