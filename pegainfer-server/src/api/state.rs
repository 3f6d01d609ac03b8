//! The state that all request handlers share.

use super::policy::FieldPolicy;
use super::quota::Quota;
use crate::budget::{Budget, BudgetError};
use crate::error::{ApiError, truncate_for_error};
use crate::lifecycle::Lifecycle;
use crate::limits::Limits;
use crate::metrics::Metrics;
use crate::output::OutputBudget;
use crate::record::Recorder;
use crate::rejection::Rejection;
use crate::tenant::Tenant;
use crate::text_service::Checkpoint;
use crate::text_service::{CancelCheck, EncoderError, GrammarService, GrammarTrial};
use axum::http::StatusCode;
use pegainfer_core::engine::EngineHandle;
use pegainfer_text::{GrammarCompiler, Tokenizer};
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Options for requests, set by the operator.
#[derive(Debug, Clone)]
pub struct ApiOptions {
    /// True if unknown request fields are refused.
    pub strict: bool,
    /// True if control tokens in messages are treated as plain text.
    pub plain_messages: bool,
    /// True if volatile parts of known agents' prompts are left out.
    pub normalize_prompts: bool,
    /// Maximum size of a request body, in bytes.
    pub max_body: usize,
    /// Maximum time for which a client may send no byte of a body.
    pub client_timeout: Duration,
    /// Maximum time for which a stream sends nothing.
    pub keep_alive_interval: Duration,
    /// Tries to compile grammars within limits; `None` only checks their sources.
    pub grammar_trial: Option<GrammarTrial>,
    /// Records requests; `None` if the server does not record.
    pub recorder: Option<Arc<Recorder>>,
    /// Limits on requests.
    pub limits: Limits,
}

/// The served model: engine, tokenizer and templates, metrics.
pub struct AppState {
    /// The engine that requests are submitted to.
    pub engine: EngineHandle,
    /// Tokenizer, template and sampling defaults.
    pub checkpoint: Checkpoint,
    /// Compiles schemas and grammars into token masks.
    pub grammars: GrammarService,
    /// Names that clients may use for the model; the first one is the canonical name. Never empty.
    pub names: Vec<String>,
    /// Memory of requests that have not reached the engine.
    pub budget: Arc<Budget>,
    /// Memory of output that clients have not read yet.
    pub output: Arc<OutputBudget>,
    /// Open requests of each tenant.
    pub quota: Arc<Quota>,
    /// Counters and histograms.
    pub metrics: Arc<Metrics>,
    /// Options of the operator.
    pub options: ApiOptions,
    /// Tells whether the server drains.
    pub lifecycle: Lifecycle,
    /// Decides about unknown fields.
    pub policy: FieldPolicy,
    /// Start of the server, in Unix time.
    pub created: u64,
    /// Hashes keys, addresses and salts. Its own keys are random, so nobody can choose a string that collides with
    /// another client's.
    pub hasher: RandomState,
}

impl AppState {
    /// The state of a server before its first request. An empty `names` becomes the checkpoint's own name.
    pub fn new(
        engine: EngineHandle,
        checkpoint: Checkpoint,
        mut names: Vec<String>,
        options: ApiOptions,
        lifecycle: Lifecycle,
    ) -> Arc<Self> {
        if names.is_empty() {
            names.push(checkpoint.name.clone());
        }
        let metrics = Arc::new(Metrics::new(engine.clone(), &names[0], options.recorder.clone()));
        let limits = engine.limits();
        let (vocab_size, eos) = (limits.vocab_size, limits.eos_token_ids.clone());
        checkpoint.warn_of_endless_answers(&eos);
        let compiler =
            checkpoint.encoder.run(move |tokenizer| GrammarCompiler::new(tokenizer.clone(), vocab_size, eos));
        let grammars = GrammarService::new(compiler, options.grammar_trial.clone());
        Arc::new(Self {
            grammars,
            budget: Arc::new(Budget::new(options.limits.max_inflight_bytes)),
            output: Arc::new(OutputBudget::new(options.limits.max_inflight_bytes)),
            quota: Arc::new(Quota::new(options.limits.max_requests_per_key.map_or(usize::MAX, Into::into))),
            engine,
            checkpoint,
            names,
            metrics,
            policy: FieldPolicy::new(options.strict),
            lifecycle,
            options,
            created: unix_time(),
            hasher: RandomState::new(),
        })
    }

    /// The model name for the response; 404 for a model that is not served here.
    pub fn model_named(&self, name: Option<String>) -> Result<String, ApiError> {
        match name {
            None => Ok(self.names[0].clone()),
            Some(name) if self.names.contains(&name) => Ok(name),
            Some(name) => {
                let served = self.names.join(", ");
                let message =
                    format!("the model {:?} does not exist; this server has: {served}", truncate_for_error(&name));
                Err(ApiError::new(StatusCode::NOT_FOUND, message).with_param("model").with_code("model_not_found"))
            }
        }
    }

    /// Hashes a salt to 64 bits, never 0 (which is "no salt").
    pub fn hash_salt(&self, salt: impl Hash) -> u64 {
        self.hasher.hash_one(salt).max(1)
    }

    /// Runs work for a tenant off the async threads, see [`Encoder::work`](crate::text_service::Encoder::work).
    pub async fn work<T: Send + 'static>(
        &self,
        tenant: Tenant,
        bytes: usize,
        work: impl FnOnce(&Arc<Tokenizer>, &CancelCheck<'_>) -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        self.checkpoint.encoder.work(tenant, bytes, work).await.map_err(|error| encoder_error(&error))
    }

    /// Refuses a text of `bytes` bytes that cannot fit the context, before it is tokenized.
    pub fn check_length(&self, bytes: usize, field: &'static str) -> Result<(), ApiError> {
        let (min_tokens, max_tokens) =
            (self.checkpoint.tokenizer.min_tokens(bytes), self.engine.limits().max_model_len);
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
