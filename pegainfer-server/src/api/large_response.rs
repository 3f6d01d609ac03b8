//! Large responses: their share of the output budget, and the threads that write them.

use super::delta::Delta;
use super::hold::Hold;
use super::response_size;
use super::state::{AppState, over_budget};
use crate::error::ApiError;
use crate::output::ResponseShare;
use crate::tenant::Tenant;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper::body::{Frame, SizeHint};
use serde::Serialize;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};

/// Responses up to this size are written on the async threads, and take no share of the budget before they are sent.
pub const INLINE: u64 = 128 << 10;
/// The share of a response grows in steps of this size.
const STEP: u64 = 64 << 10;

/// Bytes of a response while its tokens and log-probabilities are generated, and their share of the output budget. All
/// choices of a request count together.
#[derive(Debug)]
pub struct GrowingResponse {
    tenant: Tenant,
    grown: Mutex<Grown>,
}

#[derive(Debug, Default)]
struct Grown {
    bytes: u64,
    granted: u64,
    share: ResponseShare,
}

impl GrowingResponse {
    /// An empty response to `tenant`.
    pub fn new(tenant: Tenant) -> Self {
        Self { tenant, grown: Mutex::default() }
    }

    /// Counts a delta that is kept until the response is written. Fails if other responses use all of the budget.
    pub fn add(&self, delta: &Delta, state: &AppState) -> Result<(), ApiError> {
        self.add_bytes(response_size::delta_bytes(delta), state)
    }

    /// Counts bytes of the response other than its tokens.
    pub fn add_bytes(&self, bytes: u64, state: &AppState) -> Result<(), ApiError> {
        let mut grown = self.grown.lock().unwrap_or_else(PoisonError::into_inner);
        grown.bytes += bytes;
        let needed = grown.bytes.saturating_sub(INLINE);
        if needed > grown.granted {
            let more = (needed - grown.granted).next_multiple_of(STEP);
            let result = state.output.grow(&mut grown.share, self.tenant, more as usize);
            result.map_err(|error| over_budget(&error, state))?;
            grown.granted += more;
        }
        Ok(())
    }

    /// Responds with the JSON from `write`, which runs off the async threads if the response is large.
    pub async fn respond(
        self,
        state: &AppState,
        write: impl FnOnce() -> Vec<u8> + Send + 'static,
    ) -> Result<Response, ApiError> {
        let (json, share) = self.write(state, write).await?;
        Ok(json_response(json, share))
    }

    /// The bytes from `write`, which runs off the async threads if they are many, and their share.
    pub async fn write(
        self,
        state: &AppState,
        write: impl FnOnce() -> Vec<u8> + Send + 'static,
    ) -> Result<(Vec<u8>, ResponseShare), ApiError> {
        let Grown { bytes, share, .. } = self.grown.into_inner().unwrap_or_else(PoisonError::into_inner);
        let written =
            if bytes <= INLINE { write() } else { state.work(self.tenant, bytes as usize, |_| write()).await? };
        Ok((written, share))
    }
}

/// Waits for the share of a response of at most `bytes` bytes to the request of `hold`, if it is large. A request that
/// holds a turn of large work is refused instead of waiting, because others wait for its turn.
pub async fn share(state: &AppState, hold: &Hold, tenant: Tenant, bytes: usize) -> Result<ResponseShare, ApiError> {
    let mut share = ResponseShare::default();
    if bytes as u64 <= INLINE {
        return Ok(share);
    }
    let granted = if hold.has_turn() {
        state.output.grow(&mut share, tenant, bytes).map(|()| share)
    } else {
        state.output.response(tenant, bytes).await
    };
    granted.map_err(|error| over_budget(&error, state))
}

/// Refuses a response that may be larger than one may be. `what` are the words for it.
pub fn check_size(what: &str, bytes: usize, state: &AppState) -> Result<(), ApiError> {
    if bytes as u64 <= state.options.limits.max_response_bytes {
        return Ok(());
    }
    let limit = state.options.limits.max_response_bytes;
    let message =
        format!("{what} may have {bytes} bytes, at most {limit} are given (--max-response-bytes): send fewer tokens");
    Err(ApiError::new(StatusCode::BAD_REQUEST, message).with_code("response_too_large"))
}

/// A response that holds its share of the budget until its bytes go to the connection, where they count as unread
/// output.
pub fn json_response(json: Vec<u8>, share: ResponseShare) -> Response {
    let body = Body::new(Unsent::new(json, share));
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// The JSON of one of our own structs.
pub fn json_bytes(value: &impl Serialize) -> Vec<u8> {
    // Writing plain structs to memory cannot fail.
    serde_json::to_vec(value).unwrap_or_default()
}

/// The bytes of a response, and their share of the output budget.
pub struct Unsent(Option<(Bytes, ResponseShare)>);

impl Unsent {
    /// The body with these bytes.
    pub fn new(bytes: Vec<u8>, mut share: ResponseShare) -> Self {
        share.shrink(bytes.len());
        Self(Some((bytes.into(), share)))
    }
}

impl HttpBody for Unsent {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.take().map(|(bytes, _)| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.as_ref().map_or(0, |(bytes, _)| bytes.len() as u64))
    }
}
