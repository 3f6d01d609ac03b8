//! `POST /tokenize` and `POST /detokenize`, in the shapes of vLLM.

use super::body;
use super::chat_request::read_conversation;
use super::policy::with_ignored;
use super::schema::Body;
use super::schema::tokenize::{DetokenizeFields, TokenizeFields};
use super::schema::values::TokenId;
use super::state::AppState;
use super::stop::check_vocabulary;
use crate::error::ApiError;
use axum::Json;
use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use std::sync::Arc;

/// Handles `POST /tokenize`: the token ids of a text, or of messages as the chat template renders them.
pub async fn tokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (_, bytes) = body::read(request, &state.options).await?;
    let Input { prompt, field, add_special_tokens, with_strings, ignored } = read(&bytes, &state)?;
    drop(bytes);
    let tokens = state.encode_prompt(prompt, add_special_tokens, field).await?;
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

/// What to tokenize.
struct Input {
    /// Segments that are tokenized one by one.
    prompt: Vec<String>,
    /// The field that holds it.
    field: &'static str,
    add_special_tokens: bool,
    with_strings: bool,
    ignored: Option<HeaderValue>,
}

fn read(bytes: &[u8], state: &AppState) -> Result<Input, ApiError> {
    let mut body = Body::parse(bytes)?;
    let TokenizeFields { model, prompt, add_special_tokens, return_token_strs } = body.read()?;
    state.model_named(model)?;
    // A chat template writes its own special tokens.
    let (prompt, field, default) = match prompt {
        Some(text) => (vec![text], "prompt", true),
        None if body.has("messages") => {
            let conversation = read_conversation(&mut body)?;
            (conversation.render(state, 0)?.prompt, "messages", false)
        }
        None => return Err(ApiError::invalid("prompt", "send the text as prompt, or a conversation as messages")),
    };
    let ignored = state.policy.check(&body)?;
    let add_special_tokens = add_special_tokens.unwrap_or(default);
    Ok(Input { prompt, field, add_special_tokens, with_strings: return_token_strs.unwrap_or(false), ignored })
}

/// Handles `POST /detokenize`: the text of token ids, special tokens included.
pub async fn detokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (_, bytes) = body::read(request, &state.options).await?;
    let mut body = Body::parse(&bytes)?;
    let DetokenizeFields { model, tokens } = body.read()?;
    let ignored = state.policy.check(&body)?;
    state.model_named(model)?;
    let Some(tokens) = tokens else { return Err(ApiError::invalid("tokens", "tokens is missing")) };
    let ids: Vec<u32> = tokens.into_iter().map(|TokenId(id)| id).collect();
    check_vocabulary(&ids, state.engine.limits().vocab_size, "tokens")?;
    let response = json!({"prompt": state.checkpoint.tokenizer.decode_all(&ids)});
    Ok(with_ignored(Json(response).into_response(), ignored))
}
