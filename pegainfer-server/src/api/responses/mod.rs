//! `POST /v1/responses`: OpenAI's Responses API, stateless: earlier responses are not stored.
//!
//! # Layout
//! - [`request`]: a body as a chat request; [`input`]: its items; [`tools`]: its tools, and the way back to their calls.
//! - [`response`]: writes the response, whole or streamed.

mod input;
mod request;
mod response;
mod tools;

use super::body;
use super::policy::with_ignored;
use super::schema::Body;
use super::sse;
use super::state::{AppState, unix_time};
use super::stream_options::StreamOptions;
use super::submitted_chat::SubmittedChat;
use crate::error::ApiError;
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use response::ResponseWriter;
use std::sync::Arc;

/// Handles `POST /v1/responses`.
pub async fn responses(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (context, bytes) = body::read(request, &state).await?;
    let shared = state.clone();
    let read = move |bytes: &[u8]| request::read(Body::parse(bytes)?, &shared.policy);
    let (chat, reply) = bytes.parse(&state, read).await?;
    let SubmittedChat { params, mut generations, mut parsers, ignored, .. } =
        SubmittedChat::start(chat, &context, &state).await?;
    let timer = context.submitted();
    let (Some(parser), 1) = (parsers.pop(), generations.len()) else {
        return Err(ApiError::internal("a response has exactly one choice"));
    };
    let writer = ResponseWriter::new(&params, unix_time(), reply, parser);
    let response = match params.stream {
        // The last event always reports the token counts.
        Some(_) => {
            let options = StreamOptions { include_usage: true, continuous_usage: false };
            sse::respond(state.clone(), timer, generations, 1, writer, options).await?
        }
        None => Json(writer.whole(&mut generations[0]).await?).into_response(),
    };
    Ok(with_ignored(response, ignored))
}
