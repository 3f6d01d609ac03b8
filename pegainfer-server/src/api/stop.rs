//! `stop` and `stop_token_ids`.

use super::fields::{Fields, describe, token_id};
use crate::error::ApiError;
use serde_json::Value;

/// Maximum number of stop strings of one request. (OpenAI allows 4.)
const MAX_STOPS: usize = 16;
/// Maximum length of one stop string, in bytes.
const MAX_STOP_LENGTH: usize = 1024;
/// Maximum number of stop token ids of one request.
const MAX_STOP_TOKENS: usize = 128;

/// Parses `stop`: one string, or a list.
pub fn parse_strings(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let invalid = |message: String| Err(ApiError::invalid("stop", message));
    let stops = match fields.remove("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(list)) => {
            if list.len() > MAX_STOPS {
                return invalid(format!("stop may hold at most {MAX_STOPS} strings, got {}", list.len()));
            }
            let mut stops = Vec::with_capacity(list.len());
            for value in list {
                let Value::String(stop) = value else {
                    return invalid(format!("stop must be a string or a list of strings, got {}", describe(&value)));
                };
                stops.push(stop);
            }
            stops
        }
        Some(other) => return invalid(format!("stop must be a string or a list of strings, got {}", describe(&other))),
    };
    if stops.iter().any(String::is_empty) {
        return invalid("stop must not hold an empty string".into());
    }
    if stops.iter().any(|stop| stop.len() > MAX_STOP_LENGTH) {
        return invalid(format!("a stop string may be at most {MAX_STOP_LENGTH} bytes long"));
    }
    Ok(stops)
}

/// Parses `stop_token_ids`: token ids that end the text.
pub fn parse_token_ids(fields: &mut Fields, vocab_size: usize) -> Result<Vec<u32>, ApiError> {
    let list = fields.list("stop_token_ids")?.unwrap_or_default();
    if list.len() > MAX_STOP_TOKENS {
        let message = format!("stop_token_ids may hold at most {MAX_STOP_TOKENS} ids, got {}", list.len());
        return Err(ApiError::invalid("stop_token_ids", message));
    }
    list.iter().map(|value| token_id(value, vocab_size, "stop_token_ids")).collect()
}
