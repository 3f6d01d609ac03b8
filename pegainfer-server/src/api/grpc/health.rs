//! `grpc.health.v1.Health/Check`, for probes. It needs no key.

use super::control::answer;
use super::fields::Fields;
use crate::api::info;
use crate::api::state::AppState;
use crate::error::{ApiError, truncate_for_error};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use std::sync::Arc;

/// A question for the health of a service; the empty name is the server.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HealthCheckRequest {
    #[prost(string, tag = "1")]
    service: String,
}

/// The answer.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HealthCheckResponse {
    /// 1 is SERVING, 2 is NOT_SERVING.
    #[prost(int32, tag = "1")]
    status: i32,
}

const SERVING: i32 = 1;
const NOT_SERVING: i32 = 2;

/// Handles `Health.Check`: serving while `/health` is 200.
pub async fn check(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let reply = async |call: HealthCheckRequest| {
        if !["", "vllm.Inference", "vllm.Control"].contains(&call.service.as_str()) {
            let message = format!("there is no service {:?}", truncate_for_error(&call.service));
            return Err(ApiError::new(StatusCode::NOT_FOUND, message));
        }
        let (status, _) = info::health(State(state.clone())).await;
        Ok(HealthCheckResponse { status: if status == StatusCode::OK { SERVING } else { NOT_SERVING } })
    };
    answer(&state, request, &const { Fields::flat(1) }, reply).await
}
