//! The model that a request names.

use super::body::RequestContext;
use super::hold::Hold;
use super::schema::generation::GenerationFields;
use super::schema::keep_alive::KeepAliveField;
use super::state::AppState;
use crate::allowed::Allowed;
use crate::error::{ApiError, truncate_for_error};
use crate::models::{Access, KeepAlive, Lease, LoadError, ModelStatus, Models};
use crate::text_service::CancelCheck;
use axum::http::{HeaderValue, StatusCode};
use pegainfer_core::adapter::Adapter;
use pegainfer_text::Tokenizer;
use std::ops::Deref;
use std::sync::Arc;

/// The server, and the model that one of its requests names. The model stays in memory until the last clone is dropped.
#[derive(Clone)]
pub struct ModelState {
    /// The server.
    pub server: Arc<AppState>,
    /// The model.
    pub model: Arc<Lease>,
    /// Name of the model or adapter for the response.
    pub name: String,
    /// The adapter that the request names; `None` for the model itself.
    pub adapter: Option<Arc<Adapter>>,
}

impl Deref for ModelState {
    type Target = Arc<AppState>;

    fn deref(&self) -> &Arc<AppState> {
        &self.server
    }
}

/// The model that a request names, and how it waits for it.
#[derive(Debug, Default)]
pub struct Wanted {
    /// Name of a model or adapter; `None` for the first one.
    pub name: Option<String>,
    /// How long the model stays without requests from now on.
    pub keep_alive: Option<KeepAlive>,
    /// True if the response is a stream, which begins while the model is loaded.
    pub is_stream: bool,
}

impl GenerationFields {
    /// The model that they name.
    pub fn wanted(&mut self) -> Wanted {
        let keep_alive = self.keep_alive.map(|KeepAliveField(keep_alive)| keep_alive);
        Wanted { name: self.model.take(), keep_alive, is_stream: self.stream == Some(true) }
    }
}

impl From<Option<String>> for Wanted {
    fn from(name: Option<String>) -> Self {
        Self { name, ..Self::default() }
    }
}

impl ModelState {
    /// The model or adapter that a request names, loaded if necessary; 404 for one that is not served here, or not for
    /// this caller. `ignored` is the value of `x-ignored-fields` so far.
    pub async fn named(
        server: &Arc<AppState>,
        wanted: Wanted,
        context: &RequestContext,
        ignored: Option<&HeaderValue>,
    ) -> Result<Self, ApiError> {
        let (models, allowed) = (&server.models, &context.allowed);
        let Wanted { name, keep_alive, is_stream } = wanted;
        let name = name.unwrap_or_else(|| default_name(models, allowed));
        let of_adapter = || models.find_adapter(&name).filter(|_| allowed.adapter(&name)).map(|id| (id, true));
        let found = models.find(Some(&name)).map(|id| (id, false)).or_else(of_adapter);
        let (id, is_adapter) = found.ok_or_else(|| unknown(models, &name, allowed))?;
        if allowed.models.is_some() && !allowed.model(&models.names(id)) {
            return Err(unknown(models, &name, allowed));
        }
        let model = match models.request(id, keep_alive) {
            Access::Ready(lease) => lease,
            Access::Refused(error) => return Err(refusal(error)),
            Access::Later(lease) => {
                if is_stream {
                    context.announce_stream(ignored);
                    context.announce_wait(format!("loading {name}"));
                }
                let lease = lease.await.map_err(|_| ApiError::internal("the model's loader has ended"))?;
                lease.map_err(refusal)?
            }
        };
        let adapter = match &model.adapters {
            Some(adapters) if is_adapter => match adapters.get(&name).await {
                Some(Ok(adapter)) => Some(adapter),
                Some(Err(error)) => {
                    return Err(ApiError::internal(format!("the adapter {name} cannot be read again: {error}")));
                }
                None => return Err(unknown(models, &name, allowed)),
            },
            _ if is_adapter => return Err(unknown(models, &name, allowed)),
            _ => None,
        };
        Ok(Self { server: server.clone(), model: Arc::new(model), name, adapter })
    }

    /// Runs work with the tokenizer of the model off the async threads, for the request of `hold`.
    pub async fn tokenize<T: Send + 'static>(
        &self,
        hold: &Hold,
        work: impl FnOnce(&Arc<Tokenizer>, &CancelCheck<'_>) -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        hold.tokenize(&self.server, &self.model.text.checkpoint, work).await
    }

    /// Refuses token ids of a client that stand for images, which only chats have.
    pub fn refuse_image_tokens(&self, ids: &[u32], field: &'static str) -> Result<(), ApiError> {
        let Some(reader) = &self.model.text.images else { return Ok(()) };
        match ids.iter().position(|id| *id == reader.token) {
            None => Ok(()),
            Some(at) => {
                let (marker, id) = (reader.marker(), reader.token);
                let message = format!(
                    "{field} has the image token {marker} ({id}) at position {at}, but no image: send images as messages \
                     of /v1/chat/completions"
                );
                Err(ApiError::invalid(field, message).with_code("invalid_image"))
            }
        }
    }

    /// Refuses a text of `bytes` bytes that cannot fit the context, before it is tokenized.
    pub fn check_length(&self, bytes: usize, field: &'static str) -> Result<(), ApiError> {
        let (min_tokens, max_tokens) =
            (self.model.text.checkpoint.tokenizer.min_tokens(bytes), self.model.engine.limits().max_model_len);
        if min_tokens < max_tokens {
            return Ok(());
        }
        let message = format!(
            "the prompt has {bytes} bytes, which are at least {min_tokens} tokens, but this model's context is {max_tokens} tokens; \
             shorten the prompt"
        );
        Err(ApiError::invalid(field, message).with_code("context_length_exceeded"))
    }
}

/// The model of a request that names none: the first one that its key may use.
fn default_name(models: &Models, allowed: &Allowed) -> String {
    let names = models.ids().into_iter().map(|id| models.names(id));
    let (mut all, mut first) = (names.clone(), names);
    let name = all.find(|names| allowed.model(names)).or_else(|| first.next());
    name.and_then(|names| names.into_iter().next()).unwrap_or_default()
}

/// The refusal of a request whose model cannot be used.
pub fn refusal(error: LoadError) -> ApiError {
    let message = error.to_string();
    match error {
        LoadError::Busy(_) => ApiError::overloaded(message),
        LoadError::Failed(_) => ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("model_not_loaded"),
        LoadError::TooLarge(_) => ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("model_too_large"),
        LoadError::Refused(_) => ApiError::new(StatusCode::CONFLICT, message).with_code("model_stays"),
    }
}

/// The refusal of a name that is not served to such callers.
pub fn unknown(models: &Models, name: &str, allowed: &Allowed) -> ApiError {
    let served: Vec<String> = models.statuses().into_iter().flat_map(|model| served_names(model, allowed)).collect();
    let nearest = nearest(name, &served).map_or_else(String::new, |near| format!(", did you mean {near}?"));
    let (shown, served) = (truncate_for_error(name), served.join(", "));
    let message = format!("the model {shown:?} does not exist{nearest}; this server has: {served}");
    ApiError::new(StatusCode::NOT_FOUND, message).with_param("model").with_code("model_not_found")
}

/// Names of a model and of its adapters that such callers may use.
fn served_names(model: ModelStatus, allowed: &Allowed) -> Vec<String> {
    if !allowed.model(&model.names) {
        return Vec::new();
    }
    let adapters = model.adapters.into_iter().map(|card| card.name).filter(|name| allowed.adapter(name));
    model.names.into_iter().chain(adapters).collect()
}

/// Similarity from which on a name may be a misspelt one, from 0 to 1.
const SIMILAR: f64 = 0.8;

/// The name that the client may have meant.
fn nearest<'a>(name: &str, names: &'a [String]) -> Option<&'a str> {
    let scored = names.iter().map(|known| (strsim::jaro_winkler(name, known), known.as_str()));
    scored.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(score, _)| *score > SIMILAR).map(|(_, known)| known)
}
