//! The calls of `vllm.Control` about adapters, and about models that sleep.

use super::control::answer;
use super::fields::Fields;
use crate::adapters::AdapterCard;
use crate::api::adapters::{load_named, unload_named};
use crate::api::model_control::leave;
use crate::api::model_state::refusal;
use crate::api::state::AppState;
use crate::error::ApiError;
use crate::models::{Leave, ModelId, Status};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use std::sync::Arc;
use vllm_proto::{
    IsSleepingRequest, IsSleepingResponse, ListLorasRequest, ListLorasResponse, LoadLoraRequest, LoadLoraResponse,
    LoraAdapter, PauseMode, SleepRequest, SleepResponse, UnloadLoraRequest, UnloadLoraResponse, WakeUpRequest,
    WakeUpResponse,
};

/// Handles `Control.LoadLora`, for admins.
pub async fn load_lora(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let reply = async |call: LoadLoraRequest| {
        load_named(&state, None, &call.lora_name, &call.source_path, false).await.map_err(not_enabled)?;
        Ok(LoadLoraResponse { adapter: find_adapter(&state, &call.lora_name) })
    };
    answer(&state, request, &const { Fields::flat(2) }, reply).await
}

/// Handles `Control.UnloadLora`, for admins.
pub async fn unload_lora(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let reply = async |call: UnloadLoraRequest| {
        let adapter = find_adapter(&state, &call.lora_name);
        unload_named(&state, &call.lora_name).map_err(not_enabled)?;
        Ok(UnloadLoraResponse { adapter })
    };
    answer(&state, request, &const { Fields::flat(1) }, reply).await
}

/// Handles `Control.ListLoras`: those that the caller may use, by name.
pub async fn list_loras(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let allowed: crate::allowed::Allowed = request.extensions().get().cloned().unwrap_or_default();
    let reply = async |_: ListLorasRequest| {
        let cards = cards(&state).into_iter().filter(|card| allowed.adapter(&card.name));
        Ok(ListLorasResponse { adapters: cards.map(|card| lora(&state, card)).collect() })
    };
    answer(&state, request, &const { Fields::flat(0) }, reply).await
}

/// The adapters of all models, by name.
fn cards(state: &AppState) -> Vec<AdapterCard> {
    let mut cards: Vec<_> = state.models.statuses().into_iter().flat_map(|status| status.adapters).collect();
    cards.sort_by(|a, b| a.name.cmp(&b.name));
    cards
}

fn find_adapter(state: &AppState, name: &str) -> Option<LoraAdapter> {
    cards(state).into_iter().find(|card| card.name == name).map(|card| lora(state, card))
}

/// An adapter has no number here: its id is a hash of its name, positive and the same until the server ends.
fn lora(state: &AppState, card: AdapterCard) -> LoraAdapter {
    let lora_id = (state.hash_salt(&card.name) >> 1).max(1) as i64;
    LoraAdapter { lora_id, lora_name: card.name, source_path: card.path.to_string_lossy().into_owned() }
}

/// Adapters that are not enabled are a state of the server, not an unknown path.
fn not_enabled(error: ApiError) -> ApiError {
    if error.reason() == "unknown_url" { error.with_status(StatusCode::CONFLICT) } else { error }
}

fn first_model(state: &AppState) -> Result<ModelId, ApiError> {
    state.models.find(None).ok_or_else(|| ApiError::new(StatusCode::NOT_FOUND, "there is no model"))
}

/// Handles `Control.Sleep`, for admins: the first model sleeps when its requests have ended.
pub async fn sleep(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let reply = async |call: SleepRequest| {
        let how = match call.level {
            None | Some(1) => Leave::Sleep,
            Some(2) => Leave::Unload,
            Some(_) => return Err(ApiError::invalid("level", "level must be 1 or 2")),
        };
        if ![PauseMode::Unspecified, PauseMode::Wait].map(i32::from).contains(&call.mode) {
            let message = "mode must be PAUSE_MODE_WAIT: a model sleeps when its requests have ended";
            return Err(ApiError::invalid("mode", message).with_code("unsupported_parameter"));
        }
        leave(&state, first_model(&state)?, how).await?;
        Ok(SleepResponse {})
    };
    answer(&state, request, &const { Fields::flat(2) }, reply).await
}

/// Handles `Control.WakeUp`, for admins: loads the first model.
pub async fn wake_up(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let reply = async |call: WakeUpRequest| {
        if !call.tags.is_empty() {
            let message = "tags must be empty: a model wakes up as a whole";
            return Err(ApiError::invalid("tags", message).with_code("unsupported_parameter"));
        }
        drop(state.models.load(first_model(&state)?).await.map_err(refusal)?);
        Ok(WakeUpResponse {})
    };
    answer(&state, request, &const { Fields::flat(1) }, reply).await
}

/// Handles `Control.IsSleeping`: true if the first model's weights are not in memory.
pub async fn is_sleeping(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let reply = async |_: IsSleepingRequest| {
        let status = state.models.status(first_model(&state)?).status;
        Ok(IsSleepingResponse { sleeping: matches!(status, Status::Sleeping | Status::Unloaded) })
    };
    answer(&state, request, &const { Fields::flat(0) }, reply).await
}
