//! `GET /debug/steps`: the newest steps of the engine.

use super::state::AppState;
use crate::error::ApiError;
use axum::extract::State;
use axum::http::Uri;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use pegainfer_core::ledger::StepTime;
use serde_json::{Value, json};
use std::sync::Arc;

/// Steps that are listed unless the client says.
const LISTED: usize = 256;

/// JSON Lines, oldest step first: number, end in seconds since the engine's start, kind, load, and microseconds measured and predicted.
/// `?last=N` lists so many.
pub async fn steps(State(state): State<Arc<AppState>>, uri: Uri) -> Result<Response, ApiError> {
    let last = match uri.query().filter(|query| !query.is_empty()) {
        None => LISTED,
        Some(query) => query
            .strip_prefix("last=")
            .and_then(|number| number.parse().ok())
            .ok_or_else(|| ApiError::invalid("last", "the query is last=N, the number of steps to list"))?,
    };
    let steps = state.engine.step_log().map(|log| log.last(last)).unwrap_or_default();
    let text: String = steps.iter().map(|step| format!("{}\n", line(step))).collect();
    Ok(([(CONTENT_TYPE, "application/jsonl")], text).into_response())
}

fn line(step: &StepTime) -> Value {
    let StepTime { number, end, load, took, predicted_us } = step;
    let mut line = json!({
        "step": number,
        "end_s": end.as_secs_f64(),
        "kind": load.kind().name(),
        "us": took.as_nanos() as f64 / 1e3,
        "predicted_us": predicted_us,
    });
    if let (Value::Object(line), Ok(Value::Object(load))) = (&mut line, serde_json::to_value(load)) {
        line.extend(load);
    }
    line
}
