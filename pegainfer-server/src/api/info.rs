//! Endpoints about the server: models, health, load, version, metrics.

use super::state::AppState;
use crate::error::ApiError;
use crate::lifecycle::Phase;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;

/// `GET /v1/models`: the served model under each of its names.
pub async fn models(State(state): State<Arc<AppState>>) -> Json<Value> {
    let data: Vec<Value> = state.names.iter().map(|name| card(&state, name)).collect();
    Json(json!({"object": "list", "data": data}))
}

/// `GET /v1/models/{name}`.
pub async fn model(State(state): State<Arc<AppState>>, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    let name = state.model_named(Some(name))?;
    Ok(Json(card(&state, &name)))
}

fn card(state: &AppState, name: &str) -> Value {
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
pub async fn health(State(state): State<Arc<AppState>>) -> (StatusCode, &'static str) {
    if !state.engine.is_healthy() {
        (StatusCode::SERVICE_UNAVAILABLE, "the engine makes no progress")
    } else if state.lifecycle.phase() != Phase::Serving {
        (StatusCode::SERVICE_UNAVAILABLE, "draining")
    } else {
        (StatusCode::OK, "")
    }
}

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

/// `GET /metrics`, in the text format of Prometheus.
pub async fn metrics(State(state): State<Arc<AppState>>) -> Result<Response, ApiError> {
    let text = state.metrics.encode().map_err(|e| ApiError::internal(format!("the metrics cannot be written: {e}")))?;
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, content_type)], text).into_response())
}
