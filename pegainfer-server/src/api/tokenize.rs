//! `POST /tokenize` and `POST /detokenize`, in the shapes of vLLM.

use super::body;
use super::conversation::Conversation;
use super::fields::{Fields, token_id};
use super::policy::with_ignored;
use super::state::AppState;
use crate::error::ApiError;
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use std::sync::Arc;

/// Handles `POST /tokenize`: the token ids of a text, or of messages as the chat template renders them.
pub async fn tokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (_, mut fields) = body::read(request, &state.options).await?;
    state.model_named(fields.string("model")?)?;
    let with_strings = fields.bool("return_token_strs")?.unwrap_or(false);
    let add_special_tokens = fields.bool("add_special_tokens")?;
    let (text, field, default) = parse_text(&mut fields, &state)?;
    let ignored = state.policy.check_unknown_fields(&fields.rest())?;

    let mut ids = state.encode(vec![text], add_special_tokens.unwrap_or(default), field).await?;
    let tokens = ids.pop().unwrap_or_default();
    let tokenizer = &state.checkpoint.tokenizer;
    let strings =
        with_strings.then(|| tokens.iter().map(|&id| tokenizer.vocabulary_text(id)).collect::<Vec<Option<String>>>());
    let response = json!({
        "count": tokens.len(),
        "max_model_len": state.engine.limits().max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    });
    Ok(with_ignored(Json(response).into_response(), ignored))
}

/// The text, its field, and whether special tokens are added by default: a chat template writes its own.
fn parse_text(fields: &mut Fields, state: &AppState) -> Result<(String, &'static str, bool), ApiError> {
    match fields.string("prompt")? {
        Some(text) => Ok((text, "prompt", true)),
        None if fields.has("messages") => {
            Ok((Conversation::parse(fields)?.render(state, 0)?.prompt, "messages", false))
        }
        None => Err(ApiError::invalid("prompt", "send the text as prompt, or a conversation as messages")),
    }
}

/// Handles `POST /detokenize`: the text of token ids, special tokens included.
pub async fn detokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (_, mut fields) = body::read(request, &state.options).await?;
    state.model_named(fields.string("model")?)?;
    let Some(list) = fields.list("tokens")? else { return Err(ApiError::invalid("tokens", "tokens is missing")) };
    let ignored = state.policy.check_unknown_fields(&fields.rest())?;
    let vocab_size = state.engine.limits().vocab_size;
    let ids: Vec<u32> = list.iter().map(|id| token_id(id, vocab_size, "tokens")).collect::<Result<_, _>>()?;
    let response = json!({"prompt": state.checkpoint.tokenizer.decode_all(&ids)});
    Ok(with_ignored(Json(response).into_response(), ignored))
}
