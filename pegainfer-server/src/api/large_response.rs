//! Large responses: their share of the memory budget, and the threads that write them.

use super::delta::Delta;
use super::response_size;
use super::state::{AppState, over_budget};
use crate::budget::Share;
use crate::error::ApiError;
use crate::tenant::Tenant;
use axum::body::Bytes;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use std::sync::{Mutex, PoisonError};

/// Responses up to this size are written on the async threads, and take no share of the memory budget.
pub const INLINE: u64 = 128 << 10;
/// Steps in which the share of a response grows.
const STEP: u64 = 64 << 10;

/// The bytes of a response while its tokens and log-probabilities are generated, and their share of the memory budget. All choices of a
/// request count together.
#[derive(Debug, Default)]
pub struct GrowingResponse(Mutex<Grown>);

#[derive(Debug, Default)]
struct Grown {
    bytes: u64,
    granted: u64,
    share: Share,
}

impl GrowingResponse {
    /// Counts a delta that is kept until the response is written; refuses it if other responses have all of the budget.
    pub fn add(&self, delta: &Delta, state: &AppState) -> Result<(), ApiError> {
        self.add_bytes(response_size::of_delta(delta), state)
    }

    /// Counts bytes that the response will have besides its tokens.
    pub fn add_bytes(&self, bytes: u64, state: &AppState) -> Result<(), ApiError> {
        let mut grown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        grown.bytes += bytes;
        let needed = grown.bytes.saturating_sub(INLINE);
        if needed > grown.granted {
            let more = (needed - grown.granted).next_multiple_of(STEP);
            let result = state.budget.grow_response(&mut grown.share, more as usize);
            result.map_err(|error| over_budget(&error, state))?;
            grown.granted += more;
        }
        Ok(())
    }

    /// Responds with the JSON that `write` gives, off the async threads if it is large.
    pub async fn respond(
        self,
        state: &AppState,
        tenant: Tenant,
        write: impl FnOnce() -> Vec<u8> + Send + 'static,
    ) -> Result<Response, ApiError> {
        let Grown { bytes, share, .. } = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        let json = if bytes <= INLINE { write() } else { state.work(tenant, bytes as usize, |_, _| write()).await? };
        Ok(json_response(json, share))
    }
}

/// The share of a response of at most `bytes` bytes, if it is large; waits for it.
pub async fn share(state: &AppState, bytes: usize) -> Result<Share, ApiError> {
    if bytes as u64 <= INLINE {
        return Ok(Share::default());
    }
    state.budget.response(bytes).await.map_err(|error| over_budget(&error, state))
}

/// A response that holds its share of the memory budget until the client has read it, or is gone.
pub fn json_response(json: Vec<u8>, share: Share) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], unsent(json, share)).into_response()
}

/// Bytes that hold a share of the memory budget until they are sent.
pub fn unsent(bytes: Vec<u8>, mut share: Share) -> Bytes {
    share.shrink(bytes.len());
    Bytes::from_owner(Unsent { bytes, _share: share })
}

/// The JSON of one of our own structs.
pub fn json_bytes(value: &impl Serialize) -> Vec<u8> {
    // Writing our own plain structs to memory cannot fail.
    serde_json::to_vec(value).unwrap_or_default()
}

/// The bytes of a response, and their share of the memory budget.
struct Unsent {
    bytes: Vec<u8>,
    _share: Share,
}

impl AsRef<[u8]> for Unsent {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}
