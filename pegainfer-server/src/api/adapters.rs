//! `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, with vLLM's answers.

use super::body;
use super::model_state::{refusal, unknown};
use super::policy::with_ignored;
use super::schema::adapters::{LoadAdapterFields, UnloadAdapterFields};
use super::schema::body::Body;
use super::state::AppState;
use crate::adapters::{Adapters, BadPath};
use crate::allowed::Allowed;
use crate::error::{ApiError, truncate_for_error};
use crate::models::{Model, Models};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use pegainfer_core::adapter::Adapter;
use pegainfer_core::engine::{EngineHandle, GenerateRequest, MAX_LOGPROBS, TokenEvent, TokenLogprobs};
use std::sync::Arc;

/// Tokens of the prompt on which an adapter must differ from the model.
const PROBE: std::ops::Range<u32> = 100..132;

/// Handles `POST /v1/load_lora_adapter`: gives an adapter in the folder of `--lora-root` a name.
pub async fn load(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (_context, bytes) = body::read(request, &state).await?;
    let shared = state.clone();
    let read = move |bytes: &[u8]| {
        let mut body = Body::parse(bytes)?;
        let fields: LoadAdapterFields = body.read()?;
        Ok((fields, shared.policy.check(&body)?))
    };
    let (fields, ignored) = bytes.parse(&state, read).await?;
    let (Some(name), Some(path)) = (fields.lora_name, fields.lora_path) else {
        return Err(ApiError::invalid("lora_name", "Both 'lora_name' and 'lora_path' must be provided."));
    };
    let in_place = fields.load_inplace.unwrap_or(false);
    load_named(&state, fields.base_model_name.as_deref(), &name, &path, in_place).await?;
    let text = format!("Success: LoRA adapter '{name}' added successfully.");
    Ok(with_ignored(text.into_response(), ignored))
}

/// Gives the adapter at `path` in the folder of `--lora-root` a name. `base` names the model, by default the first one.
pub async fn load_named(
    state: &AppState,
    base: Option<&str>,
    name: &str,
    path: &str,
    in_place: bool,
) -> Result<(), ApiError> {
    let id = state.models.find(base).ok_or_else(|| {
        unknown(&state.models, base.unwrap_or_default(), &Allowed::default()).with_param("base_model_name")
    })?;
    let model = state.models.load(id).await.map_err(refusal)?;
    let adapters = enabled(&model)?;
    check_name(&state.models, adapters, name, in_place)?;
    let path = adapters.path_for_request(path).map_err(|error| match error {
        BadPath::NoRoot => {
            let message = "this server takes no paths from requests: start it with --lora-root DIR";
            ApiError::new(StatusCode::FORBIDDEN, message).with_param("lora_path")
        }
        BadPath::Outside => {
            let path = truncate_for_error(path);
            let message = format!("{path:?} is no path in the folder of --lora-root");
            ApiError::new(StatusCode::NOT_FOUND, message).with_param("lora_path")
        }
    })?;
    let (all, new) = (adapters.clone(), name.to_owned());
    let loaded = tokio::task::spawn_blocking(move || all.load(&new, &path)).await;
    let loaded = loaded.map_err(|error| ApiError::internal(format!("the adapter could not be read: {error}")))?;
    let adapter = loaded.map_err(|error| ApiError::invalid("lora_path", error.to_string()))?;
    warn_if_unchanged(&model.engine, name, &adapter).await;
    Ok(())
}

/// Handles `POST /v1/unload_lora_adapter`: takes the name of an adapter away.
pub async fn unload(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (_context, bytes) = body::read(request, &state).await?;
    let shared = state.clone();
    let read = move |bytes: &[u8]| {
        let mut body = Body::parse(bytes)?;
        let fields: UnloadAdapterFields = body.read()?;
        Ok((fields, shared.policy.check(&body)?))
    };
    let (UnloadAdapterFields { lora_name, .. }, ignored) = bytes.parse(&state, read).await?;
    let Some(name) = lora_name else {
        return Err(ApiError::invalid("lora_name", "'lora_name' needs to be provided to unload a LoRA adapter."));
    };
    unload_named(&state, &name)?;
    let text = format!("Success: LoRA adapter '{name}' removed successfully.");
    Ok(with_ignored(text.into_response(), ignored))
}

/// Takes the name of an adapter away.
pub fn unload_named(state: &AppState, name: &str) -> Result<(), ApiError> {
    let models = state.models.peek_all();
    if models.iter().all(|model| model.adapters.is_none()) {
        return Err(not_enabled());
    }
    if !models.iter().filter_map(|model| model.adapters.as_ref()).any(|adapters| adapters.unload(name)) {
        let message = format!("The lora adapter '{}' cannot be found.", truncate_for_error(name));
        return Err(ApiError::new(StatusCode::NOT_FOUND, message).with_param("lora_name"));
    }
    log::info!("adapter {name} is unloaded");
    Ok(())
}

fn enabled(model: &Model) -> Result<&Arc<Adapters>, ApiError> {
    model.adapters.as_ref().ok_or_else(not_enabled)
}

fn not_enabled() -> ApiError {
    let message = "this server serves no LoRA adapters: start it with --enable-lora";
    ApiError::new(StatusCode::NOT_FOUND, message).with_code("unknown_url")
}

/// Refuses names that are taken, or that could not be logged.
fn check_name(models: &Models, adapters: &Adapters, name: &str, in_place: bool) -> Result<(), ApiError> {
    let shown = truncate_for_error(name);
    if name.is_empty() || name.contains(char::is_control) {
        return Err(ApiError::invalid("lora_name", format!("{shown:?} is empty or has control characters")));
    }
    if models.find(Some(name)).is_some() {
        return Err(ApiError::invalid("lora_name", format!("'{shown}' is the name of a model")));
    }
    if adapters.has(name) && !in_place {
        let message = format!(
            "The lora adapter '{shown}' has already been loaded. If you want to load the adapter in place, set \
             'load_inplace' to True."
        );
        return Err(ApiError::invalid("lora_name", message));
    }
    Ok(())
}

/// Warns of an adapter that changes nothing: a prompt has the same log-probabilities with it and without.
pub async fn warn_if_unchanged(engine: &EngineHandle, name: &str, adapter: &Arc<Adapter>) {
    let with = probe(engine, Some(adapter.clone())).await;
    if with.is_some() && with == probe(engine, None).await {
        log::warn!("the adapter {name} changes nothing: the model gives the same logits with it and without it");
    }
}

/// Log-probabilities after a prompt; `None` if the engine does not take it.
async fn probe(engine: &EngineHandle, adapter: Option<Arc<Adapter>>) -> Option<TokenLogprobs> {
    let limits = engine.limits();
    let length = (limits.max_model_len / 2).min(PROBE.len());
    let prompt: Vec<u32> = PROBE.take(length).map(|id| id % limits.vocab_size as u32).collect();
    let request = GenerateRequest { adapter, logprobs: Some(MAX_LOGPROBS), ..GenerateRequest::greedy(prompt, 1) };
    let mut stream = engine.submit(request).ok()?;
    while let Some(event) = stream.recv().await {
        if let TokenEvent::Token(token) = event {
            return token.logprobs.map(|report| *report);
        }
    }
    None
}
