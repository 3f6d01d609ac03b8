//! vLLM's gRPC services `vllm.Inference` and `vllm.Control`, and the health check of gRPC.
//!
//! A call is an HTTP/2 request whose body is one message: a byte of flags, the length, and protobuf. It passes the same
//! middleware as other requests, so keys, limits, deadlines and metrics are the same. A generating call becomes the
//! fields of a completion, and runs as one.
//!
//! # Layout
//! - [`wire`]: messages in bodies. [`fields`]: fields of a message that this server does not know, and its memory.
//! - [`request`]: a generating call as the fields of a completion. [`generate`]: runs it. [`output`]: its responses.
//! - [`control`], [`models`]: the calls of `vllm.Control`. [`health`]: the health check.

mod control;
mod fields;
mod generate;
mod health;
mod models;
mod output;
mod request;
mod wire;

use super::state::AppState;
use crate::error::{ApiError, truncate_for_error};
use axum::Router;
use axum::http::{StatusCode, Uri};
use axum::routing::post;
use std::sync::Arc;

/// The router of all calls.
pub fn router(state: &Arc<AppState>) -> Router {
    Router::new()
        .route("/vllm.Inference/Generate", post(generate::generate))
        .route("/vllm.Inference/GenerateStream", post(generate::generate_stream))
        .route("/vllm.Control/GetServerInfo", post(control::server_info))
        .route("/vllm.Control/GetModelInfo", post(control::model_info))
        .route("/vllm.Control/GetKvEventSources", post(control::kv_event_sources))
        .route("/vllm.Control/Abort", post(control::abort))
        .route("/vllm.Control/Shutdown", post(control::shutdown))
        .route("/vllm.Control/LoadLora", post(models::load_lora))
        .route("/vllm.Control/UnloadLora", post(models::unload_lora))
        .route("/vllm.Control/ListLoras", post(models::list_loras))
        .route("/vllm.Control/Sleep", post(models::sleep))
        .route("/vllm.Control/WakeUp", post(models::wake_up))
        .route("/vllm.Control/IsSleeping", post(models::is_sleeping))
        .route("/grpc.health.v1.Health/Check", post(health::check))
        .fallback(unknown_method)
        .method_not_allowed_fallback(unknown_method)
        .with_state(state.clone())
}

/// The refusal of a method that is not served.
async fn unknown_method(uri: Uri) -> ApiError {
    let path = truncate_for_error(uri.path());
    let why = match uri.path().strip_prefix("/vllm.Control/") {
        Some("PauseGeneration" | "ResumeGeneration" | "IsPaused") => {
            "generation cannot be paused: use Sleep and WakeUp"
        }
        Some(name) if name.contains("Weight") => "weights are read from files only, not from a trainer",
        _ => "this server has no such method",
    };
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, format!("{path} is not implemented: {why}")).with_code("unknown_url")
}
