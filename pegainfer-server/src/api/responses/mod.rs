//! `POST /v1/responses`: OpenAI's Responses API without stored responses.
//!
//! # Layout
//! - [`request`]: a body as a chat request; [`input`]: its items; [`tools`]: its tools, and the way back to their
//!   calls.
//! - [`response`]: writes the response, whole ([`output`]) or streamed ([`stream`]). [`wire`], [`events`]: its JSON.

pub mod events;
mod input;
mod output;
mod request;
mod response;
#[cfg(test)]
mod same_arguments;
mod stream;
mod tools;
pub mod wire;

use super::body;
use super::policy::with_ignored;
use super::schema::Body;
use super::sse;
use super::state::{AppState, unix_time};
use super::submitted_chat::SubmittedChat;
use crate::error::ApiError;
use axum::extract::{Request, State};
use axum::response::Response;
use output::ResponseOutput;
use response::ResponseWriter;
use std::sync::Arc;

/// Handles `POST /v1/responses`.
pub async fn responses(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (context, bytes) = body::read(request, &state).await?;
    // The response repeats the largest parts of the request: its tools and instructions.
    let repeated_bytes = bytes.len();
    let shared = state.clone();
    let read = move |bytes: &[u8]| request::read(Body::parse(bytes)?, &shared.policy);
    let (chat, reply) = bytes.parse(&state, read).await?;
    let SubmittedChat { params, mut generations, mut parsers, ignored, .. } =
        SubmittedChat::start(chat, &context, &state).await?;
    let submitted = context.submitted();
    let (Some(parser), 1) = (parsers.pop(), generations.len()) else {
        return Err(ApiError::internal("a response has exactly one choice"));
    };
    let writer = ResponseWriter::new(parser, ResponseOutput::new(&params, unix_time(), reply));
    let response = match params.stream {
        Some(_) => sse::respond(state.clone(), submitted, generations, 1, writer).await?,
        None => writer.respond(&mut generations[0], repeated_bytes, &state).await?,
    };
    Ok(with_ignored(response, ignored))
}
