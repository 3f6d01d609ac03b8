//! The state that all request handlers share.

use super::aborts::Aborts;
use super::images::{ImageFetcher, ImageMemory};
use super::policy::FieldPolicy;
use super::quota::Quota;
use crate::budget::{Budget, BudgetError};
use crate::error::ApiError;
use crate::keyed_hash::KeyedHash;
use crate::kv_events::{KvEventSource, KvEvents};
use crate::lifecycle::Lifecycle;
use crate::limits::Limits;
use crate::metrics::Metrics;
use crate::models::Models;
use crate::output::OutputBudget;
use crate::record::Recorder;
use crate::rejection::Rejection;
use crate::tenant::Tenant;
use crate::text_service::{CancelCheck, EncoderError, Workers};
use axum::http::StatusCode;
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Default maximum size of a request body, in bytes.
const MAX_BODY: usize = 8 << 20;
/// The same if a loaded model reads images: a picture of 5 MiB takes 6.7 MiB in base64.
const MAX_BODY_WITH_IMAGES: usize = 64 << 20;

/// Options for requests, set by the operator.
#[derive(Debug, Clone)]
pub struct ApiOptions {
    /// Hashes keys, addresses and salts.
    pub hasher: KeyedHash,
    /// True if unknown request fields are refused.
    pub strict: bool,
    /// True if control tokens in messages are treated as plain text.
    pub plain_messages: bool,
    /// True if volatile parts of known agents' prompts are left out.
    pub normalize_prompts: bool,
    /// Maximum size of a request body, in bytes; `None` for the default.
    pub max_body: Option<usize>,
    /// Maximum time for which a client may send no byte of a body.
    pub client_timeout: Duration,
    /// Maximum time for which a stream sends nothing.
    pub keep_alive_interval: Duration,
    /// Records requests; `None` if the server does not record.
    pub recorder: Option<Arc<Recorder>>,
    /// Fetches images from other servers; `None` if it may not.
    pub image_fetcher: Option<ImageFetcher>,
    /// Limits on requests.
    pub limits: Limits,
}

/// The state of the server, which all models share.
pub struct AppState {
    /// The models that requests may name.
    pub models: Arc<Models>,
    /// Threads that parse requests and write responses.
    pub workers: Workers,
    /// Memory of requests that have not reached the engine.
    pub budget: Arc<Budget>,
    /// Memory of output that clients have not read yet.
    pub output: Arc<OutputBudget>,
    /// Threads and memory for images.
    pub images: ImageMemory,
    /// Open requests of each tenant.
    pub quota: Arc<Quota>,
    /// Counters and histograms.
    pub metrics: Arc<Metrics>,
    /// Options of the operator.
    pub options: ApiOptions,
    /// Running gRPC calls by the name that their client gave them.
    pub aborts: Arc<Aborts>,
    /// Tells whether the server drains.
    pub lifecycle: Lifecycle,
    /// Decides about unknown fields.
    pub policy: FieldPolicy,
    /// Start of the server, in Unix time.
    pub created: u64,
    /// Hashes keys, addresses and salts. Its own key is secret, so nobody can choose a string that collides with
    /// another client's.
    pub hasher: KeyedHash,
}

impl AppState {
    /// The state of a server before its first request.
    pub fn new(models: Arc<Models>, metrics: Arc<Metrics>, options: ApiOptions, lifecycle: Lifecycle) -> Arc<Self> {
        Arc::new(Self {
            models,
            workers: Workers::default(),
            budget: Arc::new(Budget::new(options.limits.max_inflight_bytes)),
            output: Arc::new(OutputBudget::new(options.limits.max_inflight_bytes)),
            images: ImageMemory::new(options.limits.images.max_image_memory),
            quota: Arc::new(Quota::new(options.limits.max_requests_per_key.map_or(usize::MAX, Into::into))),
            metrics,
            aborts: Arc::default(),
            policy: FieldPolicy::new(options.strict),
            lifecycle,
            created: unix_time(),
            hasher: options.hasher.clone(),
            options,
        })
    }

    /// Maximum size of a request body, in bytes.
    pub fn max_body(&self) -> usize {
        let default = || if self.models.read_images() { MAX_BODY_WITH_IMAGES } else { MAX_BODY };
        self.options.max_body.unwrap_or_else(default)
    }

    /// Hashes a salt to 64 bits, never 0 (which is "no salt").
    pub fn hash_salt(&self, salt: impl Hash) -> u64 {
        self.hasher.hash_one(salt).max(1)
    }

    /// Where the KV events of the models in memory are published, by model and engine.
    pub fn kv_event_sources(&self) -> Vec<KvEventSource> {
        let models = self.models.peek_all();
        let published = models.iter().filter_map(|model| model.kv_events.as_ref());
        published.flat_map(KvEvents::sources).cloned().collect()
    }

    /// Runs work for a tenant off the async threads, see [`Workers::work`].
    pub async fn work<T: Send + 'static>(
        &self,
        tenant: Tenant,
        bytes: usize,
        work: impl FnOnce(&CancelCheck<'_>) -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        self.workers.work(tenant, bytes, work).await.map_err(|error| encoder_error(&error))
    }
}

/// The response to a request without memory.
pub fn over_budget(error: &BudgetError, state: &AppState) -> ApiError {
    match error {
        BudgetError::Busy { .. } | BudgetError::Responses { .. } => {
            state.metrics.rejected(Rejection::InflightBytes);
            ApiError::overloaded(error.to_string())
        }
        BudgetError::TooManyValues { .. } => ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, error.to_string()),
    }
}

/// The response to a request whose prompt could not be encoded.
pub fn encoder_error(error: &EncoderError) -> ApiError {
    match error {
        EncoderError::Panicked => ApiError::internal(error.to_string()),
        EncoderError::NoThread(_) | EncoderError::Busy(_) => ApiError::overloaded(error.to_string()),
    }
}

/// Seconds since 1970.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}
