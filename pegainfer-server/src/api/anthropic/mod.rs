//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API.
//!
//! # Layout
//! - [`request`], [`history`]: translate a body into a chat request. [`response`]: writes the response, whole or streamed; [`error`]: its errors.

mod error;
mod history;
mod request;
mod response;

use super::body;
use super::conversation::Conversation;
use super::fields::Fields;
use super::policy::with_ignored;
use super::sse;
use super::state::AppState;
use super::submitted_chat::SubmittedChat;
use crate::error::ApiError;
use axum::Json;
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use error::MessagesError;
use response::MessageWriter;
use serde_json::json;
use std::sync::Arc;

/// Handles `POST /v1/messages`.
pub async fn messages(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, MessagesError> {
    let (headers, fields) = body::read(request, &state.options).await.map_err(MessagesError)?;
    respond(&state, &headers, fields).await.map_err(|error| MessagesError(request::rename(error)))
}

async fn respond(state: &Arc<AppState>, headers: &HeaderMap, fields: Fields) -> Result<Response, ApiError> {
    let chat = request::chat(fields, true)?;
    let SubmittedChat { params, mut generations, mut parsers, ignored, .. } =
        SubmittedChat::start(chat, headers, state, "messages").await?;
    let (Some(parser), 1) = (parsers.pop(), generations.len()) else {
        return Err(ApiError::internal("a message has exactly one choice"));
    };
    let writer = MessageWriter::new(&params.request_id, params.model, parser);
    let response = match params.stream {
        Some(options) => sse::respond(generations, 1, writer, options).await?,
        None => Json(writer.whole(&mut generations[0]).await?).into_response(),
    };
    Ok(with_ignored(response, ignored))
}

/// Handles `POST /v1/messages/count_tokens`: the number of prompt tokens that such a body would have.
pub async fn count_tokens(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, MessagesError> {
    let (_, fields) = body::read(request, &state.options).await.map_err(MessagesError)?;
    count(&state, fields).await.map_err(|error| MessagesError(request::rename(error)))
}

async fn count(state: &Arc<AppState>, fields: Fields) -> Result<Response, ApiError> {
    let mut chat = request::chat(fields, false)?;
    state.model_named(chat.string("model")?)?;
    let prompt = Conversation::parse(&mut chat)?.render(state, 0)?.prompt;
    let ignored = state.policy.check_unknown_fields(&chat.rest())?;
    let ids = state.encode(vec![prompt], false, "messages").await?;
    let response = json!({"input_tokens": ids.first().map_or(0, Vec::len)});
    Ok(with_ignored(Json(response).into_response(), ignored))
}
