//! Logits processors of a request: penalties, biases, banned words, allowed tokens.

use super::hold::Hold;
use super::model_state::ModelState;
use super::schema::numbers::TokenId;
use super::schema::sampling::SamplingFields;
use super::schema::values::Text;
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
    state: &ModelState,
    min_tokens: usize,
    stops: Vec<u32>,
) -> Result<Option<Arc<LogitsProcessors>>, ApiError> {
    let or_0 = |given: Option<f64>| given.map_or(0.0, |n| n as f32);
    let allowed = fields.allowed_token_ids.take();
    let mut words = bad_words(fields.bad_words.take().unwrap_or_default(), hold, state).await?;
    words.append(&mut fields.bad_words_token_ids);
    let params = LogitsProcessorParams {
        presence_penalty: or_0(fields.presence_penalty),
        frequency_penalty: or_0(fields.frequency_penalty),
        repetition_penalty: repetition_penalty(fields, state),
        logit_bias: fields.logit_bias.take().unwrap_or_default().0,
        min_tokens,
        stops,
        allowed_token_ids: allowed.map(|ids| ids.into_iter().map(|TokenId(id)| id).collect()),
        bad_words: words,
    };
    Ok(LogitsProcessors::new(params, state.model.engine.limits().vocab_size)?)
}

/// The request's repetition penalty, or the checkpoint's.
pub fn repetition_penalty(fields: &SamplingFields, state: &ModelState) -> f32 {
    let default = state.model.text.checkpoint.defaults.repetition_penalty;
    fields.repetition_penalty.map_or(default, |n| n as f32)
}

/// `bad_words` as tokens: each word at the start of a text and after a space, since most vocabularies spell them
/// differently.
async fn bad_words(list: Vec<Text>, hold: &Hold, state: &ModelState) -> Result<Vec<Vec<u32>>, ApiError> {
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
    let words = state.tokenize(hold, encode(spellings, false)).await?;
    let words: BTreeSet<_> =
        words.map_err(|error| ApiError::invalid("bad_words", error.to_string()))?.into_iter().collect();
    Ok(words.into_iter().collect())
}
