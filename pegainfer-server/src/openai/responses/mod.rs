//! `POST /v1/responses`: OpenAI's newer shape of a chat, without the server's memory of earlier responses.
//!
//! # Layout
//! - [`request`], [`input`]: a body becomes that of a chat request. [`answer`]: the answer, whole or streamed.

mod answer;
mod input;
mod request;

use super::errors::ApiError;
use super::exchange::Exchange;
use super::fields::Fields;
use super::sse;
use super::state::{AppState, unix_time};
use super::stream_options::StreamOptions;
use super::{body, with_ignored};
use answer::Format;
use axum::Json;
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

/// The handler.
pub async fn responses(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (headers, fields) = body::read(request, &state.options).await?;
    respond(&state, &headers, fields).await.map_err(request::rename)
}

async fn respond(state: &Arc<AppState>, headers: &HeaderMap, fields: Fields) -> Result<Response, ApiError> {
    let (chat, echoed) = request::chat(fields)?;
    let Exchange { params, mut generations, mut readers, ignored, .. } =
        Exchange::start(chat, headers, state, "responses").await?;
    let (Some(reader), 1) = (readers.pop(), generations.len()) else {
        return Err(ApiError::internal("a response has one answer"));
    };
    let format = Format::new(&params, unix_time(), echoed, reader);
    let response = match params.stream {
        // The last event always has the counts.
        Some(_) => {
            let options = StreamOptions { include_usage: true, continuous_usage: false };
            sse::respond(generations, 1, format, options).await?
        }
        None => Json(format.whole(&mut generations[0]).await?).into_response(),
    };
    Ok(with_ignored(response, ignored))
}
