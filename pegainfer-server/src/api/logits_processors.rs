//! The fields of the logits processors: penalties, biases, banned words, allowed tokens.

use super::fields::{Fields, describe};
use super::state::AppState;
use crate::error::ApiError;
use pegainfer_core::logits_processors::{LogitsProcessorParams, LogitsProcessors};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Maximum number of entries of `logit_bias`.
const MAX_BIASES: usize = 1024;
/// Maximum number of entries of `bad_words`.
const MAX_BAD_WORDS: usize = 128;
/// Maximum length of one entry of `bad_words`, in bytes.
const MAX_BAD_WORD_LENGTH: usize = 128;

/// Parses the fields. `stops`: the token ids that end the request, none of which may be drawn before `min_tokens` others.
pub async fn parse(
    fields: &mut Fields,
    state: &AppState,
    min_tokens: usize,
    stops: Vec<u32>,
) -> Result<Option<Arc<LogitsProcessors>>, ApiError> {
    let mut number = |name: &str, default: f32| Ok::<_, ApiError>(fields.number(name)?.map_or(default, |n| n as f32));
    let params = LogitsProcessorParams {
        presence_penalty: number("presence_penalty", 0.0)?,
        frequency_penalty: number("frequency_penalty", 0.0)?,
        repetition_penalty: number("repetition_penalty", state.checkpoint.defaults.repetition_penalty)?,
        logit_bias: parse_logit_bias(fields)?,
        min_tokens,
        stops,
        allowed_token_ids: parse_allowed(fields)?,
        bad_words: parse_bad_words(fields, state).await?,
    };
    Ok(LogitsProcessors::new(params, state.engine.limits().vocab_size)?)
}

/// Parses `logit_bias`: token ids as JSON keys, that is as strings, to numbers.
fn parse_logit_bias(fields: &mut Fields) -> Result<BTreeMap<u32, f32>, ApiError> {
    let biases = fields.object("logit_bias")?.unwrap_or_default();
    let invalid = |message: String| ApiError::invalid("logit_bias", message);
    if biases.len() > MAX_BIASES {
        return Err(invalid(format!("logit_bias may hold at most {MAX_BIASES} tokens, got {}", biases.len())));
    }
    let bias = |(key, value): (&String, &Value)| {
        let token = key.parse().map_err(|_| {
            invalid(format!("the keys of logit_bias must be token ids, got {}", describe(&Value::from(key.as_str()))))
        })?;
        let bias = value.as_f64().ok_or_else(|| {
            invalid(format!("logit_bias must hold numbers from -100 to 100, got {}", describe(value)))
        })?;
        Ok((token, bias as f32))
    };
    biases.iter().map(bias).collect()
}

fn parse_allowed(fields: &mut Fields) -> Result<Option<Vec<u32>>, ApiError> {
    let Some(list) = fields.list("allowed_token_ids")? else { return Ok(None) };
    let id = |value: &Value| {
        value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
            let message = format!("allowed_token_ids must hold token ids, got {}", describe(value));
            ApiError::invalid("allowed_token_ids", message)
        })
    };
    list.iter().map(id).collect::<Result<_, _>>().map(Some)
}

/// Parses `bad_words`: each word as tokens, at the start of a text and after a space, since most vocabularies spell them
/// differently.
async fn parse_bad_words(fields: &mut Fields, state: &AppState) -> Result<Vec<Vec<u32>>, ApiError> {
    let list = fields.list("bad_words")?.unwrap_or_default();
    let invalid = |message: String| ApiError::invalid("bad_words", message);
    if list.len() > MAX_BAD_WORDS {
        return Err(invalid(format!("bad_words may hold at most {MAX_BAD_WORDS} words, got {}", list.len())));
    }
    let mut spellings = Vec::new();
    for value in &list {
        let Some(word) = value.as_str() else {
            return Err(invalid(format!("bad_words must hold strings, got {}", describe(value))));
        };
        let bare = word.trim_start();
        if bare.is_empty() || word.len() > MAX_BAD_WORD_LENGTH {
            return Err(invalid(format!("a bad word must have 1 to {MAX_BAD_WORD_LENGTH} bytes and not be blank")));
        }
        spellings.extend([bare.to_string(), format!(" {bare}")]);
    }
    if spellings.is_empty() {
        return Ok(Vec::new());
    }
    let words: BTreeSet<Vec<u32>> = state.encode(spellings, false, "bad_words").await?.into_iter().collect();
    Ok(words.into_iter().collect())
}
