//! `GET /debug/steps`: the newest steps of the engine.

use super::large_response::json_bytes;
use super::model_state::unknown;
use super::state::AppState;
use crate::allowed::Allowed;
use crate::error::ApiError;
use crate::trace;
use axum::Json;
use axum::extract::State;
use axum::http::Uri;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use pegainfer_core::ledger::{StepLoad, StepTime};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Default number of listed steps.
const LISTED: usize = 256;

/// JSON Lines, oldest step first: number, end in seconds since the engine's start, kind, load, and measured and
/// predicted microseconds. `?last=N` lists N steps, `engine=I` those of engine I (default 0), `model=NAME` those of this
/// model; `format=perfetto` returns a trace instead, `format=ops` the seconds per op.
pub async fn steps(State(state): State<Arc<AppState>>, uri: Uri) -> Result<Response, ApiError> {
    let query = Query::parse(uri.query().unwrap_or_default())?;
    let id = state.models.find(query.model.as_deref());
    let id =
        id.ok_or_else(|| unknown(&state.models, query.model.as_deref().unwrap_or_default(), &Allowed::default()))?;
    let Some(model) = state.models.peek(id) else { return Ok(Json::<[StepRecord; 0]>([]).into_response()) };
    let engines = model.engine.engines();
    let missing = || format!("engine is the number of an engine, from 0 to {}", engines.len() - 1);
    let engine = engines.get(query.engine).ok_or_else(|| ApiError::invalid("engine", missing()))?;
    let Some(log) = engine.step_log() else { return Ok(Json::<[StepRecord; 0]>([]).into_response()) };
    let steps = log.last(query.last);
    Ok(match query.format {
        Format::Perfetto => Json(trace::steps::events(&steps, log.start())).into_response(),
        Format::Ops => Json(log.op_times(query.last).into_iter().collect::<BTreeMap<_, _>>()).into_response(),
        Format::Lines => {
            let line = |step: &StepTime| [json_bytes(&line(step)), b"\n".to_vec()].concat();
            let lines: Vec<u8> = steps.iter().flat_map(line).collect();
            ([(CONTENT_TYPE, "application/jsonl")], lines).into_response()
        }
    })
}

/// Parsed query string.
struct Query {
    last: usize,
    /// Number of the engine.
    engine: usize,
    /// Name of the model; the first one by default.
    model: Option<String>,
    format: Format,
}

/// Format of the response.
enum Format {
    /// One line of JSON per step.
    Lines,
    /// A trace.
    Perfetto,
    /// Time of the steps by op.
    Ops,
}

impl Query {
    fn parse(text: &str) -> Result<Self, ApiError> {
        let mut query = Self { last: LISTED, engine: 0, model: None, format: Format::Lines };
        for part in text.split('&').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            match name {
                "last" => {
                    let number = value.parse();
                    query.last =
                        number.map_err(|_| ApiError::invalid("last", "last is the number of steps to list"))?;
                }
                "engine" => {
                    let number = value.parse();
                    query.engine =
                        number.map_err(|_| ApiError::invalid("engine", "engine is the number of an engine"))?;
                }
                "model" => query.model = Some(value.to_owned()),
                "format" => {
                    query.format = match value {
                        "jsonl" => Format::Lines,
                        "perfetto" => Format::Perfetto,
                        "ops" => Format::Ops,
                        _ => return Err(ApiError::invalid("format", "format is jsonl, perfetto or ops")),
                    };
                }
                _ => {
                    let known =
                        "the query is last=N, the number of steps to list, engine=I, and format=jsonl, perfetto or ops";
                    return Err(ApiError::invalid("last", known));
                }
            }
        }
        Ok(query)
    }
}

/// One step of the response.
#[derive(Serialize)]
struct StepRecord {
    step: u64,
    end_s: f64,
    kind: &'static str,
    us: f64,
    predicted_us: Option<f64>,
    #[serde(flatten)]
    load: StepLoad,
}

fn line(step: &StepTime) -> StepRecord {
    let &StepTime { number, end, load, took, predicted_us } = step;
    let (kind, us) = (load.kind().name(), took.as_nanos() as f64 / 1e3);
    StepRecord { step: number, end_s: end.as_secs_f64(), kind, us, predicted_us, load }
}
