//! Ids of requests, and random numbers of the operating system.

use crate::error::ApiError;
use axum::http::{HeaderMap, HeaderName};

/// Header with the id of a request.
pub const HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// The same header of Anthropic's API.
pub const ANTHROPIC_HEADER: HeaderName = HeaderName::from_static("request-id");
/// The condition of [`is_valid`] in words, for errors.
pub const VALID: &str = "1 to 128 letters, digits, '-', '_', '.' or ':'";

/// True if an id is usable. Ids are written to logs and responses, so they must not contain anything that needs
/// quoting.
pub fn is_valid(id: &str) -> bool {
    (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:".contains(&b))
}

/// The client's `x-request-id` if it is valid, otherwise a random one: a proxy's odd id is no reason to refuse a
/// request.
pub fn request_id(headers: &HeaderMap) -> Result<String, ApiError> {
    let given = headers.get(HEADER).and_then(|value| value.to_str().ok()).filter(|id| is_valid(id));
    match given {
        Some(id) => Ok(id.to_string()),
        None => Ok(format!("{:016x}{:016x}", random_u64()?, random_u64()?)),
    }
}

/// 64 random bits from the operating system.
pub fn random_u64() -> Result<u64, ApiError> {
    getrandom::u64().map_err(|e| ApiError::internal(format!("the operating system gives no random numbers: {e}")))
}
