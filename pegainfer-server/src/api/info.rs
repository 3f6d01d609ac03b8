//! Endpoints about the server: models, health, load, version, metrics.

use super::state::AppState;
use crate::error::ApiError;
use crate::lifecycle::Phase;
use crate::metrics::Exposition;
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use jiff::Timestamp;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::sync::Arc;

/// `GET /v1/models`: the served model under each of its names, in the shape of the API that the client speaks.
pub async fn models(State(state): State<Arc<AppState>>, headers: HeaderMap) -> Json<Value> {
    let data: Vec<Value> = state.names.iter().map(|name| card(&state, &headers, name)).collect();
    if !is_anthropic(&headers) {
        return Json(json!({"object": "list", "data": data}));
    }
    let (first, last) = (state.names.first(), state.names.last());
    Json(json!({"data": data, "has_more": false, "first_id": first, "last_id": last}))
}

/// Clients of Anthropic's API always say which version of it they speak.
fn is_anthropic(headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version")
}

/// `GET /v1/models/{name}`.
pub async fn model(
    State(state): State<Arc<AppState>>,
    headers: HeaderMap,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let not_text = |_| ApiError::invalid("model", "the model's name is not valid UTF-8");
    let Path(name) = name.map_err(not_text)?;
    let name = state.model_named(Some(name))?;
    Ok(Json(card(&state, &headers, &name)))
}

fn card(state: &AppState, headers: &HeaderMap, name: &str) -> Value {
    if is_anthropic(headers) {
        let created = Timestamp::from_second(state.created as i64).unwrap_or_default();
        return json!({"type": "model", "id": name, "display_name": name, "created_at": created.to_string(),
            "max_input_tokens": state.engine.limits().max_model_len});
    }
    json!({
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "pegainfer",
        "root": state.checkpoint.name,
        "parent": null,
        "max_model_len": state.engine.limits().max_model_len,
        "permission": [],
    })
}

/// `GET /health`: 200 and no body while the engine makes progress and new requests are accepted, else 503 and the reason.
pub async fn health(State(state): State<Arc<AppState>>) -> (StatusCode, Cow<'static, str>) {
    if let Some(why) = state.engine.failure() {
        (StatusCode::SERVICE_UNAVAILABLE, format!("the engine has stopped: {why}").into())
    } else if !state.engine.is_healthy() {
        (StatusCode::SERVICE_UNAVAILABLE, "the engine makes no progress".into())
    } else if state.lifecycle.phase() != Phase::Serving {
        (StatusCode::SERVICE_UNAVAILABLE, "draining".into())
    } else {
        (StatusCode::OK, "".into())
    }
}

/// `GET /live`: 200 while the process can answer at all, also when the engine is stuck or the server drains.
pub async fn live() {}

/// `GET /load`: `server_load` is vLLM's number, for balancers that compare replicas; the other fields are its parts.
pub async fn load(State(state): State<Arc<AppState>>) -> Json<Value> {
    let stats = state.engine.stats();
    Json(json!({
        "server_load": stats.running + stats.waiting,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_cache_free": stats.kv_blocks_free as f64 / stats.kv_blocks_total.max(1) as f64,
    }))
}

/// `POST /reset_prefix_cache`: 200 once every cached prefix is dropped. Running requests keep their blocks.
pub async fn reset_prefix_cache(State(state): State<Arc<AppState>>) -> Result<(), ApiError> {
    state.engine.reset_prefix_cache().await.map_err(|e| ApiError::from_submit(e, "prompt"))
}

/// `GET /version`.
pub async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// `GET /metrics`, in the text format of Prometheus, or in OpenMetrics for clients that ask for it.
pub async fn metrics(State(state): State<Arc<AppState>>, headers: HeaderMap) -> Result<Response, ApiError> {
    let format = Exposition::accepted(&headers);
    let text = state.metrics.encode(format);
    let text = text.map_err(|e| ApiError::internal(format!("the metrics cannot be written: {e}")))?;
    Ok(([(header::CONTENT_TYPE, format.content_type())], text).into_response())
}
