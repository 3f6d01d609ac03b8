//! `GET /v1/models`: the models and adapters, and their states.

use super::model_state::unknown;
use super::state::AppState;
use crate::adapters::AdapterCard;
use crate::allowed::Allowed;
use crate::error::ApiError;
use crate::models::ModelStatus;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

/// The models under each of their names.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "Models")]
pub enum Models {
    /// OpenAI's shape.
    OpenAi {
        /// Always `list`.
        #[schemars(extend("const" = "list"))]
        object: &'static str,
        /// The names.
        data: Vec<ModelCard>,
    },
    /// Anthropic's shape, for clients that send `anthropic-version`.
    Anthropic {
        /// The names.
        data: Vec<ModelCard>,
        /// Always false.
        has_more: bool,
        /// The first name.
        first_id: Option<String>,
        /// The last name.
        last_id: Option<String>,
    },
}

/// A model under one of its names.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "Model")]
pub enum ModelCard {
    /// OpenAI's shape, with vLLM's fields.
    OpenAi {
        /// The name.
        id: String,
        /// Always `model`.
        #[schemars(extend("const" = "model"))]
        object: &'static str,
        /// Start of the server, in Unix time.
        created: u64,
        /// Always `pegainfer`.
        owned_by: &'static str,
        /// Name of the checkpoint; of an adapter, its path.
        root: String,
        /// Name of the model that an adapter changes; null for the model itself.
        parent: Option<String>,
        /// Length of the model's context; null before the model was loaded once.
        max_model_len: Option<usize>,
        /// Name of the model's family, such as `Qwen3`, while it is loaded.
        #[serde(skip_serializing_if = "Option::is_none")]
        family: Option<&'static str>,
        /// Name of the device that holds the weights.
        #[serde(skip_serializing_if = "Option::is_none")]
        device: Option<String>,
        /// Bytes of the weights on the device.
        #[serde(skip_serializing_if = "Option::is_none")]
        weight_bytes: Option<u64>,
        /// generate, embed or rerank; null before the model was loaded once.
        task: Option<&'static str>,
        /// text, or text and image; null before the model was loaded once.
        input_modalities: Option<&'static [&'static str]>,
        /// Always empty.
        permission: [Value; 0],
        /// Size of an adapter.
        #[serde(skip_serializing_if = "Option::is_none")]
        lora: Option<Box<AdapterSize>>,
        /// loaded, loading, unloading, sleeping, unloaded or failed.
        state: &'static str,
        /// Why it failed.
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<String>,
        /// True if it stays in memory.
        pinned: bool,
        /// Memory that it takes, in bytes.
        memory_bytes: u64,
        /// End of its last request, in Unix time; null before the first.
        last_used: Option<u64>,
    },
    /// Anthropic's shape, for clients that send `anthropic-version`.
    Anthropic {
        /// Always `model`.
        #[schemars(extend("const" = "model"))]
        r#type: &'static str,
        /// The name.
        id: String,
        /// The name.
        display_name: String,
        /// Start of the server.
        created_at: String,
        /// Length of the model's context, once the model was loaded.
        #[serde(skip_serializing_if = "Option::is_none")]
        max_input_tokens: Option<usize>,
    },
}

/// Size of an adapter.
#[derive(Serialize, JsonSchema)]
pub struct AdapterSize {
    /// Its largest rank.
    rank: usize,
    /// Number of matrices that it changes.
    modules: usize,
    /// Bytes of it in memory.
    bytes: usize,
}

/// `GET /v1/models`: the models under each of their names, and the adapters of those in memory, in the shape of the
/// client's API.
pub async fn models(
    State(state): State<Arc<AppState>>,
    allowed: Option<Extension<Allowed>>,
    headers: HeaderMap,
) -> Response {
    let shown = shown(&state, &allowed.unwrap_or_default());
    let (first_id, last_id) = (shown.first().map(Shown::id), shown.last().map(Shown::id));
    let data = shown.iter().map(|shown| shown.card(&state, &headers)).collect();
    let models = match is_anthropic(&headers) {
        false => Models::OpenAi { object: "list", data },
        true => Models::Anthropic { data, has_more: false, first_id, last_id },
    };
    Json(models).into_response()
}

/// `GET /v1/models/{name}`.
pub async fn model(
    State(state): State<Arc<AppState>>,
    allowed: Option<Extension<Allowed>>,
    headers: HeaderMap,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let Path(name) = name.map_err(not_text)?;
    let allowed = allowed.unwrap_or_default();
    let shown = shown(&state, &allowed);
    let found = shown.iter().find(|shown| shown.id() == name);
    let found = found.ok_or_else(|| unknown(&state.models, &name, &allowed))?;
    Ok(Json(found.card(&state, &headers)).into_response())
}

/// The refusal of a name that is no text.
pub fn not_text(_: PathRejection) -> ApiError {
    ApiError::invalid("model", "the model's name is not valid UTF-8")
}

/// True for clients of Anthropic's API, which always send its version.
fn is_anthropic(headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version")
}

/// A name that clients may use.
enum Shown {
    /// A name of a model.
    Model(Arc<ModelStatus>, String),
    /// An adapter of a model.
    Adapter(Arc<ModelStatus>, AdapterCard),
}

/// The names that such a caller may use: those of the models, then the adapters.
fn shown(state: &AppState, allowed: &Allowed) -> Vec<Shown> {
    let models = state.models.statuses().into_iter().filter(|model| allowed.model(&model.names));
    let models: Vec<Arc<ModelStatus>> = models.map(Arc::new).collect();
    let names =
        models.iter().flat_map(|model| model.names.iter().map(|name| Shown::Model(model.clone(), name.clone())));
    let adapters = models.iter().flat_map(|model| {
        let adapters = model.adapters.iter().filter(|adapter| allowed.adapter(&adapter.name));
        adapters.map(|adapter| Shown::Adapter(model.clone(), adapter.clone()))
    });
    names.chain(adapters).collect()
}

impl Shown {
    fn id(&self) -> String {
        match self {
            Self::Model(_, name) => name.clone(),
            Self::Adapter(_, adapter) => adapter.name.clone(),
        }
    }

    fn card(&self, state: &AppState, headers: &HeaderMap) -> ModelCard {
        let (model, adapter) = match self {
            Self::Model(model, _) => (model, None),
            Self::Adapter(model, adapter) => (model, Some(adapter)),
        };
        if is_anthropic(headers) {
            let created = Timestamp::from_second(state.created as i64).unwrap_or_default();
            return ModelCard::Anthropic {
                r#type: "model",
                id: self.id(),
                display_name: self.id(),
                created_at: created.to_string(),
                max_input_tokens: model.max_model_len,
            };
        }
        let last_used = model.last_used.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        let path = adapter.map(|adapter| adapter.path.to_string_lossy().into_owned());
        ModelCard::OpenAi {
            id: self.id(),
            object: "model",
            created: state.created,
            owned_by: "pegainfer",
            root: path.or_else(|| model.root.clone()).unwrap_or_else(|| model.names[0].clone()),
            parent: adapter.map(|_| model.names[0].clone()),
            max_model_len: model.max_model_len,
            family: model.placement.as_ref().map(|placement| placement.family),
            device: model.placement.as_ref().map(|placement| placement.device.clone()),
            weight_bytes: model.placement.as_ref().map(|placement| placement.weight_bytes),
            task: model.task,
            input_modalities: model.input_modalities,
            permission: [],
            lora: adapter.map(|AdapterCard { rank, modules, bytes, .. }| {
                Box::new(AdapterSize { rank: *rank, modules: *modules, bytes: *bytes })
            }),
            state: model.status.name(),
            error: model.error.clone(),
            pinned: model.pinned,
            memory_bytes: adapter.map_or(model.bytes, |adapter| adapter.bytes as u64),
            last_used: last_used.map(|since| since.as_secs()),
        }
    }
}
