//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API.
//!
//! # Layout
//! - [`request`]: a body as a chat request; [`history`], [`content`]: its turns and what they hold; [`tools`]: its
//!   tools.
//! - [`response`]: writes the response, whole or streamed; [`wire`]: its JSON. [`signature`]: signatures of reasoning.

mod content;
mod history;
mod request;
pub mod response;
mod signature;
mod tools;
pub mod wire;

use super::agents::Client;
use super::body::{self, RequestContext};
use super::chat_request::ChatRequest;
use super::model_state::ModelState;
use super::policy::with_ignored;
use super::render::{EncodedPrompt, PromptOptions};
use super::schema::Body;
use super::schema::anthropic::ThinkingDisplay;
use super::sse;
use super::state::AppState;
use super::submitted_chat::SubmittedChat;
use crate::error::ApiError;
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use response::{MessageOutput, MessageWriter};
use std::sync::Arc;
use wire::TokenCount;

/// Handles `POST /v1/messages`.
pub async fn messages(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (context, bytes) = body::read(request, &state).await?;
    let (client, shared) = (client(&context, &state), state.clone());
    let read = move |bytes: &[u8]| request::read(Body::parse(bytes)?, client, &shared.policy);
    let (chat, display) = bytes.parse(&state, read).await?;
    respond(&state, context, chat, display).await
}

async fn respond(
    state: &Arc<AppState>,
    context: RequestContext,
    chat: ChatRequest,
    display: ThinkingDisplay,
) -> Result<Response, ApiError> {
    let SubmittedChat { params, mut generations, mut parsers, ignored, .. } =
        SubmittedChat::start(chat, &context, state).await?;
    let submitted = context.submitted();
    let (Some(parser), 1) = (parsers.pop(), generations.len()) else {
        return Err(ApiError::internal("a message has exactly one choice"));
    };
    let writer = MessageWriter::new(parser, MessageOutput::new(&params.request_id, params.model, display));
    let response = match params.stream {
        Some(_) => sse::respond(state.clone(), submitted, generations, 1, writer).await?,
        None => writer.respond(&mut generations[0], state).await?,
    };
    Ok(with_ignored(response, ignored))
}

/// Handles `POST /v1/messages/count_tokens`: the number of prompt tokens of such a body.
pub async fn count_tokens(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (context, bytes) = body::read(request, &state).await?;
    let (client, shared) = (client(&context, &state), state.clone());
    let read = move |bytes: &[u8]| request::read_to_count(Body::parse(bytes)?, client, &shared.policy);
    let chat = bytes.parse(&state, read).await?;
    count(&state, &context, chat).await
}

async fn count(state: &Arc<AppState>, context: &RequestContext, chat: ChatRequest) -> Result<Response, ApiError> {
    let ChatRequest { generation, mut conversation, ignored, .. } = chat;
    let state = &ModelState::named(state, generation.model.into(), context, None).await?;
    let ignored = state.policy.check_more(ignored, &conversation.fit(state)?)?;
    let options = PromptOptions { n: 0, add_special_tokens: false, is_bounded: false };
    let EncodedPrompt { ids, .. } = conversation.encode(state, context, options).await?;
    Ok(with_ignored(Json(TokenCount { input_tokens: ids.len() }).into_response(), ignored))
}

fn client(context: &RequestContext, state: &AppState) -> Client {
    Client::from_headers(&context.headers, state.options.normalize_prompts)
}
