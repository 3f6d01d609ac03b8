//! `stop` and `stop_token_ids`.

use super::schema::numbers::TokenId;
use super::schema::values::Texts;
use crate::error::ApiError;
use pegainfer_core::engine::SubmitError;

/// Maximum number of stop strings of one request. (OpenAI allows 4.)
const MAX_STOPS: usize = 16;
/// Maximum length of one stop string, in bytes.
const MAX_STOP_LENGTH: usize = 1024;
/// Maximum number of stop token ids of one request.
const MAX_STOP_TOKENS: usize = 128;

/// Checks the stop strings. `name` is their field in the called API.
pub fn strings(stops: Option<Texts>, name: &'static str) -> Result<Vec<String>, ApiError> {
    let invalid = |message: String| Err(ApiError::invalid(name, message));
    let Some(Texts(stops)) = stops else { return Ok(Vec::new()) };
    if stops.len() > MAX_STOPS {
        return invalid(format!("{name} may hold at most {MAX_STOPS} strings, got {}", stops.len()));
    }
    if stops.iter().any(String::is_empty) {
        return invalid(format!("{name} must not hold an empty string"));
    }
    if stops.iter().any(|stop| stop.len() > MAX_STOP_LENGTH) {
        return invalid(format!("a stop string may be at most {MAX_STOP_LENGTH} bytes long"));
    }
    Ok(stops)
}

/// Checks `stop_token_ids`: token ids that end the text.
pub fn token_ids(ids: Option<Vec<TokenId>>, vocab_size: usize) -> Result<Vec<u32>, ApiError> {
    let ids = ids.unwrap_or_default();
    if ids.len() > MAX_STOP_TOKENS {
        let message = format!("stop_token_ids may hold at most {MAX_STOP_TOKENS} ids, got {}", ids.len());
        return Err(ApiError::invalid("stop_token_ids", message));
    }
    let ids: Vec<u32> = ids.into_iter().map(|TokenId(id)| id).collect();
    check_vocabulary(&ids, vocab_size, "stop_token_ids")?;
    Ok(ids)
}

/// Checks that the vocabulary has all of these tokens.
pub fn check_vocabulary(ids: &[u32], vocab_size: usize, field: &'static str) -> Result<(), ApiError> {
    match ids.iter().find(|&&id| id as usize >= vocab_size) {
        Some(&id) => Err(ApiError::from_submit(SubmitError::InvalidToken { id, vocab_size }, field)),
        None => Ok(()),
    }
}
