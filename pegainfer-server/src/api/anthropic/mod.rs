//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API.
//!
//! # Layout
//! - [`request`], [`history`]: translate a body into a chat request. [`response`]: writes the response, whole or streamed.

mod history;
mod request;
mod response;

use super::body::{self, RequestContext};
use super::chat_request::{ChatRequest, translated};
use super::conversation::PromptOptions;
use super::fields::Fields;
use super::policy::with_ignored;
use super::sse::{self, KeepAlive};
use super::state::AppState;
use super::submitted_chat::SubmittedChat;
use crate::error::ApiError;
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use response::MessageWriter;
use serde_json::json;
use std::sync::Arc;

/// Handles `POST /v1/messages`.
pub async fn messages(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (context, bytes) = body::read(request, &state).await?;
    let fields = bytes.parse(&state, body::fields).await?;
    respond(&state, context, fields).await.map_err(request::rename)
}

async fn respond(state: &Arc<AppState>, context: RequestContext, fields: Fields) -> Result<Response, ApiError> {
    let chat = translated(request::chat(fields, true)?, &state.policy)?;
    let SubmittedChat { params, mut generations, mut parsers, ignored, .. } =
        SubmittedChat::start(chat, &context, state).await?;
    // The engine has the request.
    drop(context);
    let (Some(parser), 1) = (parsers.pop(), generations.len()) else {
        return Err(ApiError::internal("a message has exactly one choice"));
    };
    let keep_alive = KeepAlive::new(params.received, &state.options);
    let writer = MessageWriter::new(&params.request_id, params.model, parser);
    let response = match params.stream {
        Some(options) => sse::respond(generations, 1, writer, options, keep_alive).await?,
        None => Json(writer.whole(&mut generations[0]).await?).into_response(),
    };
    Ok(with_ignored(response, ignored))
}

/// Handles `POST /v1/messages/count_tokens`: the number of prompt tokens that such a body would have.
pub async fn count_tokens(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (context, bytes) = body::read(request, &state).await?;
    let fields = bytes.parse(&state, body::fields).await?;
    count(&state, &context, fields).await.map_err(request::rename)
}

async fn count(state: &Arc<AppState>, context: &RequestContext, fields: Fields) -> Result<Response, ApiError> {
    let ChatRequest { generation, conversation, ignored, .. } =
        translated(request::chat(fields, false)?, &state.policy)?;
    state.model_named(generation.model)?;
    let options = PromptOptions { n: 0, add_special_tokens: false, is_bounded: false };
    let (_, ids) = conversation.encode(state, context, options).await?;
    let response = json!({"input_tokens": ids.len()});
    Ok(with_ignored(Json(response).into_response(), ignored))
}
