//! Endpoints about the server: health, load, version, metrics.

use super::state::AppState;
use crate::error::ApiError;
use crate::kv_events::KvEventSource;
use crate::lifecycle::Phase;
use crate::metrics::Exposition;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pegainfer_core::engine::{EngineCell, EngineStats};
use schemars::JsonSchema;
use serde::Serialize;
use std::borrow::Cow;
use std::sync::Arc;

/// `GET /health`: 200 while the server can serve its models and accepts new requests, otherwise 503 and the reason. The
/// body names engines and models that do not; usually it is empty.
pub async fn health(State(state): State<Arc<AppState>>) -> (StatusCode, Cow<'static, str>) {
    let (models, several) = (state.models.peek_all(), state.models.ids().len() > 1);
    let mut lines = String::new();
    for model in &models {
        let of = if several { format!("{}: ", model.names[0]) } else { String::new() };
        if let Some(why) = model.engine.failure() {
            lines += &format!("{of}the engine has stopped: {why}\n");
        } else if !model.engine.is_healthy() {
            lines += &format!("{of}the engine makes no progress\n");
        } else {
            unhealthy_engines(model.engine.engines()).lines().for_each(|line| lines += &format!("{of}{line}\n"));
        }
    }
    let is_served = models.is_empty() || models.iter().any(|model| model.engine.is_healthy());
    if !is_served {
        (StatusCode::SERVICE_UNAVAILABLE, lines.trim_end().to_owned().into())
    } else if state.lifecycle.phase() != Phase::Serving {
        (StatusCode::SERVICE_UNAVAILABLE, "draining".into())
    } else {
        (StatusCode::OK, lines.into())
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

/// `GET /live`: 200 while a restart would not help, also while the server drains. 503 while an engine hangs and no other
/// makes progress: a device that hangs seldom recovers. A server whose last engine has stopped exits by itself.
pub async fn live(State(state): State<Arc<AppState>>) -> (StatusCode, &'static str) {
    let models = state.models.peek_all();
    let hangs = models.iter().any(|model| model.engine.failure().is_none() && !model.engine.is_healthy());
    match hangs && !models.iter().any(|model| model.engine.is_healthy()) {
        true => (StatusCode::SERVICE_UNAVAILABLE, "the engine makes no progress"),
        false => (StatusCode::OK, ""),
    }
}

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
    /// The same of each engine, if there are several of one model.
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
    let models = state.models.peek_all();
    let stats: EngineStats = models.iter().map(|model| model.engine.stats()).sum();
    let waiting = stats.waiting + state.models.waiting();
    let engine_load = |(engine, cell): (usize, &EngineCell)| {
        let (stats, healthy) = (cell.stats(), cell.is_healthy());
        let EngineStats { running, waiting, .. } = stats;
        EngineLoad { engine, healthy, running, waiting, kv_cache_free: kv_cache_free(&stats) }
    };
    let engines = match &models[..] {
        [model] => model.engine.engines(),
        _ => &[],
    };
    Json(LoadResponse {
        server_load: stats.running + waiting,
        running: stats.running,
        waiting,
        kv_cache_free: kv_cache_free(&stats),
        engines: (engines.len() > 1).then(|| engines.iter().enumerate().map(engine_load).collect()),
    })
}

/// `POST /reset_prefix_cache`: 200 after every cached prefix was dropped. Running requests keep their blocks.
pub async fn reset_prefix_cache(State(state): State<Arc<AppState>>) -> Result<(), ApiError> {
    for model in state.models.peek_all() {
        model.engine.reset_prefix_cache().await.map_err(|e| ApiError::from_submit(e, "prompt"))?;
    }
    Ok(())
}

/// `GET /kv_event_sources`: where KV events are published, as vLLM lists them; an empty list without
/// `--kv-events-config`.
pub async fn kv_event_sources(State(state): State<Arc<AppState>>) -> Json<Vec<KvEventSource>> {
    Json(state.kv_event_sources())
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
