//! `POST /v1/responses`: OpenAI's Responses API, stateless: earlier responses are not stored.
//!
//! # Layout
//! - [`request`], [`input`]: translate a body into a chat request. [`response`]: writes the response, whole or streamed.

mod input;
mod request;
mod response;

use super::body::{self, RequestContext};
use super::chat_request::translated;
use super::fields::Fields;
use super::policy::with_ignored;
use super::sse::{self, KeepAlive};
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
    let fields = bytes.parse(&state, body::fields).await?;
    respond(&state, context, fields).await.map_err(request::rename)
}

async fn respond(state: &Arc<AppState>, context: RequestContext, fields: Fields) -> Result<Response, ApiError> {
    let (chat, echoed) = request::chat(fields)?;
    let SubmittedChat { params, mut generations, mut parsers, ignored, .. } =
        SubmittedChat::start(translated(chat, &state.policy)?, &context, state).await?;
    // The engine has the request.
    drop(context);
    let (Some(parser), 1) = (parsers.pop(), generations.len()) else {
        return Err(ApiError::internal("a response has exactly one choice"));
    };
    let writer = ResponseWriter::new(&params, unix_time(), echoed, parser);
    let keep_alive = KeepAlive::new(params.received, &state.options);
    let response = match params.stream {
        // The last event always reports the token counts.
        Some(_) => {
            let options = StreamOptions { include_usage: true, continuous_usage: false };
            sse::respond(generations, 1, writer, options, keep_alive).await?
        }
        None => Json(writer.whole(&mut generations[0]).await?).into_response(),
    };
    Ok(with_ignored(response, ignored))
}
