//! Logits processors of a request: penalties, biases, banned words, allowed tokens.

use super::hold::Hold;
use super::schema::numbers::TokenId;
use super::schema::sampling::SamplingFields;
use super::schema::values::Text;
use super::state::AppState;
use crate::error::ApiError;
use crate::text_service::encode;
use pegainfer_core::logits_processors::{LogitsProcessorParams, LogitsProcessors};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Maximum number of entries of `bad_words`.
const MAX_BAD_WORDS: usize = 128;
/// Maximum length of one entry of `bad_words`, in bytes.
const MAX_BAD_WORD_LENGTH: usize = 128;

/// The processors set by the fields. `stops` are the token ids that end the request; none of them may be drawn before
/// `min_tokens` tokens.
pub async fn build(
    fields: &mut SamplingFields,
    hold: &Hold,
    state: &AppState,
    min_tokens: usize,
    stops: Vec<u32>,
) -> Result<Option<Arc<LogitsProcessors>>, ApiError> {
    let or = |given: Option<f64>, default: f32| given.map_or(default, |n| n as f32);
    let allowed = fields.allowed_token_ids.take();
    let params = LogitsProcessorParams {
        presence_penalty: or(fields.presence_penalty, 0.0),
        frequency_penalty: or(fields.frequency_penalty, 0.0),
        repetition_penalty: or(fields.repetition_penalty, state.checkpoint.defaults.repetition_penalty),
        logit_bias: fields.logit_bias.take().unwrap_or_default().0,
        min_tokens,
        stops,
        allowed_token_ids: allowed.map(|ids| ids.into_iter().map(|TokenId(id)| id).collect()),
        bad_words: bad_words(fields.bad_words.take().unwrap_or_default(), hold, state).await?,
    };
    Ok(LogitsProcessors::new(params, state.engine.limits().vocab_size)?)
}

/// `bad_words` as tokens: each word at the start of a text and after a space, since most vocabularies spell them
/// differently.
async fn bad_words(list: Vec<Text>, hold: &Hold, state: &AppState) -> Result<Vec<Vec<u32>>, ApiError> {
    let invalid = |message: String| ApiError::invalid("bad_words", message);
    if list.len() > MAX_BAD_WORDS {
        return Err(invalid(format!("bad_words may hold at most {MAX_BAD_WORDS} words, got {}", list.len())));
    }
    let mut spellings = Vec::new();
    for Text(word) in &list {
        let bare = word.trim_start();
        if bare.is_empty() || word.len() > MAX_BAD_WORD_LENGTH {
            return Err(invalid(format!("a bad word must have 1 to {MAX_BAD_WORD_LENGTH} bytes and not be blank")));
        }
        spellings.extend([bare.to_string(), format!(" {bare}")]);
    }
    if spellings.is_empty() {
        return Ok(Vec::new());
    }
    let words = hold.work(state, encode(spellings, false)).await?;
    let words: BTreeSet<_> =
        words.map_err(|error| ApiError::invalid("bad_words", error.to_string()))?.into_iter().collect();
    Ok(words.into_iter().collect())
}
