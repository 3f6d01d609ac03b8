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
use pegainfer_core::engine::{EngineCell, EngineStats};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;
use std::borrow::Cow;
use std::sync::Arc;

/// The served model under each of its names.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "Models")]
pub enum Models<'a> {
    /// OpenAI's shape.
    OpenAi {
        /// Always `list`.
        #[schemars(extend("const" = "list"))]
        object: &'static str,
        /// The names.
        data: Vec<ModelCard<'a>>,
    },
    /// Anthropic's shape, for clients that send `anthropic-version`.
    Anthropic {
        /// The names.
        data: Vec<ModelCard<'a>>,
        /// Always false.
        has_more: bool,
        /// The first name.
        first_id: Option<&'a str>,
        /// The last name.
        last_id: Option<&'a str>,
    },
}

/// The served model under one of its names.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "Model")]
pub enum ModelCard<'a> {
    /// OpenAI's shape, with vLLM's fields.
    OpenAi {
        /// The name.
        id: &'a str,
        /// Always `model`.
        #[schemars(extend("const" = "model"))]
        object: &'static str,
        /// Start of the server, in Unix time.
        created: u64,
        /// Always `pegainfer`.
        owned_by: &'static str,
        /// Name of the checkpoint.
        root: &'a str,
        /// Always null.
        parent: Option<&'static str>,
        /// Length of the model's context.
        max_model_len: usize,
        /// Always empty.
        permission: [Value; 0],
    },
    /// Anthropic's shape, for clients that send `anthropic-version`.
    Anthropic {
        /// Always `model`.
        #[schemars(extend("const" = "model"))]
        r#type: &'static str,
        /// The name.
        id: &'a str,
        /// The name.
        display_name: &'a str,
        /// Start of the server.
        created_at: String,
        /// Length of the model's context.
        max_input_tokens: usize,
    },
}

/// `GET /v1/models`: the served model under each of its names, in the shape of the client's API.
pub async fn models(State(state): State<Arc<AppState>>, headers: HeaderMap) -> Response {
    let data: Vec<ModelCard<'_>> = state.names.iter().map(|name| card(&state, &headers, name)).collect();
    let (first_id, last_id) = (state.names.first().map(String::as_str), state.names.last().map(String::as_str));
    let models = match is_anthropic(&headers) {
        false => Models::OpenAi { object: "list", data },
        true => Models::Anthropic { data, has_more: false, first_id, last_id },
    };
    Json(models).into_response()
}

/// True for clients of Anthropic's API, which always send its version.
fn is_anthropic(headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version")
}

/// `GET /v1/models/{name}`.
pub async fn model(
    State(state): State<Arc<AppState>>,
    headers: HeaderMap,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let not_text = |_| ApiError::invalid("model", "the model's name is not valid UTF-8");
    let Path(name) = name.map_err(not_text)?;
    let name = state.model_named(Some(name))?;
    Ok(Json(card(&state, &headers, &name)).into_response())
}

fn card<'a>(state: &'a AppState, headers: &HeaderMap, name: &'a str) -> ModelCard<'a> {
    let length = state.engine.limits().max_model_len;
    if is_anthropic(headers) {
        let created = Timestamp::from_second(state.created as i64).unwrap_or_default();
        return ModelCard::Anthropic {
            r#type: "model",
            id: name,
            display_name: name,
            created_at: created.to_string(),
            max_input_tokens: length,
        };
    }
    ModelCard::OpenAi {
        id: name,
        object: "model",
        created: state.created,
        owned_by: "pegainfer",
        root: &state.checkpoint.name,
        parent: None,
        max_model_len: length,
        permission: [],
    }
}

/// `GET /health`: 200 while an engine makes progress and new requests are accepted, otherwise 503 and the reason. The
/// body names engines that do not; usually it is empty.
pub async fn health(State(state): State<Arc<AppState>>) -> (StatusCode, Cow<'static, str>) {
    if let Some(why) = state.engine.failure() {
        (StatusCode::SERVICE_UNAVAILABLE, format!("the engine has stopped: {why}").into())
    } else if !state.engine.is_healthy() {
        (StatusCode::SERVICE_UNAVAILABLE, "the engine makes no progress".into())
    } else if state.lifecycle.phase() != Phase::Serving {
        (StatusCode::SERVICE_UNAVAILABLE, "draining".into())
    } else {
        (StatusCode::OK, unhealthy_engines(state.engine.engines()).into())
    }
}

/// A line for each engine that makes no progress.
fn unhealthy_engines(engines: &[EngineCell]) -> String {
    let all = engines.len();
    let line = |(i, engine): (usize, &EngineCell)| match engine.failure() {
        Some(why) => Some(format!("engine {i} of {all} has stopped: {why}\n")),
        None if !engine.is_healthy() => Some(format!("engine {i} of {all} makes no progress\n")),
        None => None,
    };
    engines.iter().enumerate().filter_map(line).collect()
}

/// `GET /live`: 200 while the process can answer at all, even if the engine is stuck or the server drains.
pub async fn live() {}

/// Numbers of requests, for balancers that compare replicas.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Load")]
pub struct LoadResponse {
    /// Running and waiting requests, vLLM's number.
    server_load: usize,
    /// Running requests.
    running: usize,
    /// Waiting requests.
    waiting: usize,
    /// Free part of the KV cache, from 0 to 1.
    kv_cache_free: f64,
    /// The same of each engine, if there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    engines: Option<Vec<EngineLoad>>,
}

/// Numbers of one engine's requests.
#[derive(Serialize, JsonSchema)]
pub struct EngineLoad {
    /// Number of the engine.
    engine: usize,
    /// False if it makes no progress.
    healthy: bool,
    /// Running requests.
    running: usize,
    /// Waiting requests.
    waiting: usize,
    /// Free part of its KV cache, from 0 to 1.
    kv_cache_free: f64,
}

/// Free part of the KV cache, from 0 to 1.
fn kv_cache_free(stats: &EngineStats) -> f64 {
    stats.kv_blocks_free as f64 / stats.kv_blocks_total.max(1) as f64
}

/// `GET /load`.
pub async fn load(State(state): State<Arc<AppState>>) -> Json<LoadResponse> {
    let stats = state.engine.stats();
    let engine_load = |(engine, cell): (usize, &EngineCell)| {
        let (stats, healthy) = (cell.stats(), cell.is_healthy());
        let EngineStats { running, waiting, .. } = stats;
        EngineLoad { engine, healthy, running, waiting, kv_cache_free: kv_cache_free(&stats) }
    };
    let engines = state.engine.engines();
    Json(LoadResponse {
        server_load: stats.running + stats.waiting,
        running: stats.running,
        waiting: stats.waiting,
        kv_cache_free: kv_cache_free(&stats),
        engines: (engines.len() > 1).then(|| engines.iter().enumerate().map(engine_load).collect()),
    })
}

/// `POST /reset_prefix_cache`: 200 after every cached prefix was dropped. Running requests keep their blocks.
pub async fn reset_prefix_cache(State(state): State<Arc<AppState>>) -> Result<(), ApiError> {
    state.engine.reset_prefix_cache().await.map_err(|e| ApiError::from_submit(e, "prompt"))
}

/// The server's version.
#[derive(Serialize, JsonSchema)]
pub struct Version {
    /// The version.
    version: &'static str,
}

/// `GET /version`.
pub async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION") })
}

/// `GET /metrics`, in the text format of Prometheus, or in OpenMetrics for clients that ask for it.
pub async fn metrics(State(state): State<Arc<AppState>>, headers: HeaderMap) -> Result<Response, ApiError> {
    let format = Exposition::accepted(&headers);
    let text = state.metrics.encode(format);
    let text = text.map_err(|e| ApiError::internal(format!("the metrics cannot be written: {e}")))?;
    Ok(([(header::CONTENT_TYPE, format.content_type())], text).into_response())
}
