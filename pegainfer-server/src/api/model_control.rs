//! `POST /v1/models/{name}/load`, `unload` and `sleep`, for admins.

use super::model_list::not_text;
use super::model_state::{refusal, unknown};
use super::state::AppState;
use crate::allowed::Allowed;
use crate::error::{ApiError, truncate_for_error};
use crate::models::{Leave, ModelId, ModelStatus};
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Serialize;
use std::sync::Arc;

/// The state of a model after the request.
#[derive(Serialize, JsonSchema)]
pub struct ModelSwitched {
    /// Its canonical name.
    id: String,
    /// loaded, sleeping or unloaded.
    state: &'static str,
    /// Memory that it takes, in bytes.
    memory_bytes: u64,
}

/// What happens to the model.
enum Verb {
    Load,
    Leave(Leave),
}

/// Handles `POST /v1/models/{name}/load`, `unload` and `sleep?level=1` or 2. Answers when it is done.
pub async fn switch(
    State(state): State<Arc<AppState>>,
    path: Result<Path<String>, PathRejection>,
    RawQuery(query): RawQuery,
) -> Response {
    let mut response = switched(state, path, query).await.into_response();
    if response.status() == StatusCode::METHOD_NOT_ALLOWED {
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
    }
    response
}

async fn switched(
    state: Arc<AppState>,
    path: Result<Path<String>, PathRejection>,
    query: Option<String>,
) -> Result<Json<ModelSwitched>, ApiError> {
    let Path(path) = path.map_err(not_text)?;
    let (name, verb) = path.rsplit_once('/').unwrap_or((&path, ""));
    let verb = match verb {
        "load" => Verb::Load,
        "unload" => Verb::Leave(Leave::Unload),
        "sleep" => Verb::Leave(sleep_level(query.as_deref().unwrap_or_default())?),
        _ => {
            let path = truncate_for_error(&path);
            let message =
                format!("/v1/models/{path} takes POST requests only with /load, /unload or /sleep at its end");
            return Err(ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message));
        }
    };
    let id = state.models.find(Some(name)).ok_or_else(|| unknown(&state.models, name, &Allowed::default()))?;
    match verb {
        Verb::Load => drop(state.models.load(id).await.map_err(refusal)?),
        Verb::Leave(how) => leave(&state, id, how).await?,
    }
    let ModelStatus { names, status, bytes, .. } = state.models.status(id);
    Ok(Json(ModelSwitched { id: names[0].clone(), state: status.name(), memory_bytes: bytes }))
}

/// Takes model `id` out of memory when its requests have ended.
pub async fn leave(state: &AppState, id: ModelId, how: Leave) -> Result<(), ApiError> {
    let models = state.models.clone();
    let done = tokio::task::spawn_blocking(move || models.leave(id, how, "an admin asked for it")).await;
    let done = done.map_err(|error| ApiError::internal(format!("the model could not be unloaded: {error}")))?;
    done.map(drop).map_err(refusal)
}

/// The level of `level=1`, which is the default, or `level=2`, as in vLLM.
fn sleep_level(query: &str) -> Result<Leave, ApiError> {
    match query {
        "" | "level=1" => Ok(Leave::Sleep),
        "level=2" => Ok(Leave::Unload),
        _ => {
            let message = "level is 1, which keeps what it can in host memory, or 2, which keeps nothing";
            Err(ApiError::invalid("level", message))
        }
    }
}
