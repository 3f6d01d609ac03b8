//! The parameters shared by completions and chats, parsed and checked.

use super::aborts::AbortEntry;
use super::body::RequestContext;
use super::conversation::FieldNames;
use super::logits_processors;
use super::model_state::ModelState;
use super::prefer;
use super::response_size::ResponseSize;
use super::sampling::Sampling;
use super::schema::generation::GenerationFields;
use super::schema::numbers::Int;
use super::schema::sampling::SamplingFields;
use super::schema::vectors::VectorFields;
use super::stop;
use super::stream_options::StreamOptions;
use super::token_rate::too_many;
use super::truncation::Truncation;
use crate::adapters::OpenAdapter;
use crate::error::{ApiError, ENGINE_HEADER};
use crate::ids;
use crate::lifecycle::{Deadline, Lifecycle};
use crate::metrics::Choices;
use crate::output::Outbox;
use crate::rates::Meter;
use crate::tenant::Tenant;
use crate::text_service::Task;
use crate::trace::Trace;
use axum::http::HeaderMap;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use pegainfer_core::adapter::Adapter;
use pegainfer_core::engine::GenerateRequest;
use pegainfer_core::grammar::Grammar;
use pegainfer_core::logits_processors::LogitsProcessors;
use std::sync::Arc;
use std::time::Instant;

/// Parameters of a generating request, independent of its endpoint.
#[derive(Debug, Clone)]
pub struct Params {
    /// The model name that the client sent, or the canonical one.
    pub model: String,
    /// The adapter that it names; `None` for the model itself.
    adapter: Option<Arc<Adapter>>,
    /// Part of the response id.
    pub request_id: String,
    /// Header `x-request-id`: names the request in the log, even if the client sets another id.
    log_id: Arc<str>,
    /// When the request is cancelled.
    pub deadline: Option<Deadline>,
    /// `None`: the response is one JSON object.
    pub stream: Option<StreamOptions>,
    /// Maximum number of tokens to generate, if the client gave one.
    pub max_tokens: Option<usize>,
    /// Number of choices for each prompt.
    pub n: usize,
    /// Minimum number of tokens to generate. Before that, neither EOS nor stop tokens are drawn, and stop strings are
    /// ignored.
    pub min_tokens: usize,
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// Token ids that end the text.
    pub stop_token_ids: Vec<u32>,
    /// True if the text includes the stop string.
    pub include_stop: bool,
    /// True if the text includes special tokens.
    pub show_special: bool,
    /// True if the text begins with the prompt; completions only.
    pub echo: bool,
    /// Number of most likely tokens to report at each position of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// True to send token ids with the text.
    pub token_ids: bool,
    /// True if log-probabilities name tokens by their ids.
    pub ids_as_text: bool,
    /// True if only the vectors of prompts are wanted.
    vector: bool,
    /// True to run the tokenizer's post-processor (BOS) over the prompt.
    pub add_special_tokens: Option<bool>,
    /// True if the response reports the time of each stage.
    pub include_metrics: bool,
    /// When the whole body had arrived.
    pub received: Instant,
    /// Trace that records the stages of the request.
    pub trace: Option<Arc<Trace>>,
    /// Outcome of the request's choices, for its log line.
    pub choices: Option<Arc<Choices>>,
    /// Names of the fields in the API that was called.
    pub names: &'static FieldNames,
    /// Factor of the logits of tokens that were used, the client's or the checkpoint's.
    pub repetition_penalty: f32,
    sampling: Sampling,
    logits_processors: Option<Arc<LogitsProcessors>>,
    ignore_eos: bool,
    priority: i32,
    cache_salt: u64,
    /// Engine that the client named.
    engine: Option<usize>,
    /// True if the request is refused unless its prompt is cached.
    only_if_cached: bool,
    /// Tenant of the request.
    pub tenant: Tenant,
    /// Output that the client has not read yet.
    pub outbox: Option<Arc<Outbox>>,
    /// Counts the tokens of the request, if its key has rates.
    pub meter: Option<Arc<Meter>>,
    truncation: Option<Truncation>,
    /// Cancels the request when its client asks for that by name.
    pub abort: Option<Arc<AbortEntry>>,
}

impl Params {
    /// Checks the fields that all generating endpoints share; 400 if the model generates no text.
    pub async fn new(
        fields: GenerationFields,
        sampling: SamplingFields,
        names: &'static FieldNames,
        context: &RequestContext,
        state: &ModelState,
    ) -> Result<Self, ApiError> {
        let what = match &state.model.text.checkpoint.task {
            Task::Generate => return Self::checked(fields, sampling, names, context, state).await,
            Task::Embed { .. } => "makes vectors of texts: use /v1/embeddings",
            Task::Rerank(_) => "ranks documents: use /v1/rerank",
        };
        Err(ApiError::invalid("model", format!("{} {what}", state.name)).with_code("wrong_task"))
    }

    async fn checked(
        mut fields: GenerationFields,
        mut sampling: SamplingFields,
        names: &'static FieldNames,
        context: &RequestContext,
        state: &ModelState,
    ) -> Result<Self, ApiError> {
        let stream = StreamOptions::new(fields.stream, fields.stream_options.as_deref())?;
        let prompt_logprobs = fields.prompt_logprobs.map(|n| n.count());
        if prompt_logprobs.is_some() && stream.is_some() {
            let message = "prompt_logprobs cannot be streamed: leave out \"stream\": true";
            return Err(ApiError::invalid("prompt_logprobs", message));
        }
        let limits = state.model.engine.limits();
        let stop_token_ids = stop::token_ids(sampling.stop_token_ids.take(), limits.vocab_size)?;
        let ignore_eos = sampling.ignore_eos.unwrap_or(false);
        let min_tokens = sampling.min_tokens.map_or(0, |n| n.count());
        let eos = limits.eos_token_ids.iter().filter(|_| !ignore_eos);
        let stops = eos.chain(&stop_token_ids).copied().collect();
        // `max_completion_tokens` is the newer name and wins.
        let newer = fields.max_completion_tokens.map(|n| n.count());
        Ok(Self {
            model: state.name.clone(),
            adapter: state.adapter.clone(),
            request_id: request_id(sampling.request_id.take(), &context.headers)?,
            log_id: ids::request_id(&context.headers)?.into(),
            deadline: context.deadline,
            stream,
            max_tokens: newer.or(fields.max_tokens.map(|n| n.count())),
            n: choices(&fields)?,
            min_tokens,
            stop: stop::strings(fields.stop.take(), names.stop)?,
            stop_token_ids,
            include_stop: fields.include_stop_str_in_output.unwrap_or(false),
            show_special: !sampling.skip_special_tokens.unwrap_or(true),
            echo: false,
            prompt_logprobs,
            token_ids: fields.return_token_ids.unwrap_or(false),
            ids_as_text: fields.return_tokens_as_token_ids.unwrap_or(false),
            vector: false,
            add_special_tokens: fields.add_special_tokens,
            include_metrics: fields.include_metrics.unwrap_or(false),
            received: context.received,
            trace: context.trace.clone(),
            choices: context.choices.clone(),
            names,
            repetition_penalty: logits_processors::repetition_penalty(&sampling, state),
            sampling: Sampling::new(&sampling, state)?,
            truncation: Truncation::new(fields.truncate_prompt_tokens, fields.truncation_side)?,
            abort: None,
            ignore_eos,
            priority: priority(sampling.priority.map_or(0, |n| n.0 as i32), state)?,
            cache_salt: cache_salt(sampling.cache_salt.as_deref(), context.tenant, state)?,
            engine: engine(&context.headers)?,
            only_if_cached: prefer::only_if_cached(&context.headers),
            tenant: context.tenant,
            outbox: context.outbox.clone(),
            meter: context.meter.clone(),
            logits_processors: logits_processors::build(&mut sampling, &context.hold, state, min_tokens, stops).await?,
        })
    }

    /// Parameters of requests that want the vectors of their prompts, and no text.
    pub async fn for_vectors(
        fields: VectorFields,
        context: &RequestContext,
        state: &ModelState,
    ) -> Result<Self, ApiError> {
        let VectorFields { priority, cache_salt, .. } = fields;
        let sampling = SamplingFields { priority, cache_salt, ..SamplingFields::default() };
        let generation = GenerationFields { max_tokens: Some(Int(0)), ..GenerationFields::default() };
        let params = Self::checked(generation, sampling, &FieldNames::CHAT, context, state).await?;
        // The preference is one of generating routes.
        Ok(Self { vector: true, only_if_cached: false, ..params })
    }

    /// Counts a choice among the open ones of its adapter, if it has one.
    pub fn adapter_use(&self, state: &ModelState) -> Option<OpenAdapter> {
        let adapters = state.model.adapters.as_ref().filter(|_| self.adapter.is_some())?;
        Some(adapters.open(&self.model))
    }

    /// Resolves with the client's error when the request has to be cancelled.
    pub fn cutoff(&self, lifecycle: &Lifecycle) -> BoxFuture<'static, ApiError> {
        let cutoff = lifecycle.cutoff(self.deadline);
        let Some(abort) = &self.abort else { return cutoff };
        let aborted = abort.aborted();
        async move {
            tokio::select! {
                error = cutoff => error,
                error = aborted => error,
            }
        }
        .boxed()
    }

    /// True if a long prompt is truncated.
    pub fn is_truncated(&self) -> bool {
        self.truncation.is_some()
    }

    /// The engine's label of choice `choice` of `choices`: the request's id, with the number if there are several.
    pub fn label(&self, choice: usize, choices: usize) -> Arc<str> {
        if choices == 1 { self.log_id.clone() } else { format!("{}#{choice}", self.log_id).into() }
    }

    /// True if the response needs the prompt.
    pub fn keeps_prompt(&self) -> bool {
        self.echo || self.prompt_logprobs.is_some() || self.token_ids
    }

    /// The engine's requests for one prompt, one per choice. `default_max_tokens` is the maximum output if the client
    /// gave none, limited by the context and the KV pool.
    pub fn requests(
        &self,
        mut prompt: Vec<u32>,
        default_max_tokens: usize,
        logprobs: Option<usize>,
        grammar: Option<Arc<dyn Grammar>>,
        state: &ModelState,
    ) -> Result<Vec<GenerateRequest>, ApiError> {
        let limits = state.model.engine.limits();
        if let Some(truncation) = self.truncation {
            truncation.apply(&mut prompt, limits.max_model_len.saturating_sub(self.max_tokens.unwrap_or(1)));
        }
        // An echoed prompt has log-probabilities like the text after it.
        let prompt_logprobs = self.prompt_logprobs.max(logprobs.filter(|_| self.echo));
        let context = limits.max_model_len.saturating_sub(prompt.len());
        let pool = (limits.kv_capacity_tokens() + 1).saturating_sub(prompt.len());
        // At least 1, so that the engine's own check refuses a prompt that fills the context.
        let capacity = context.min(pool).max(1);
        if self.max_tokens == Some(0) && !self.echo && !self.vector {
            let message = "max_tokens must be an integer from 1 to 2147483647, got 0: only \"echo\": true takes 0";
            return Err(ApiError::invalid("max_tokens", message));
        }
        // The engine generates at least one token. A request for none does not show it.
        let size = ResponseSize::new(prompt.len(), logprobs, prompt_logprobs);
        let fitting = size.max_tokens(self.n, state.options.limits.max_response_bytes);
        let default = || {
            let wanted = default_max_tokens.min(fitting).min(capacity);
            let left =
                self.meter.as_ref().map_or(Ok(usize::MAX), |meter| meter.remaining(prompt.len(), self.n, wanted));
            left.map(|left| wanted.min(left)).map_err(|exceeded| too_many(&exceeded, state))
        };
        let max_tokens = self.max_tokens.map_or_else(default, Ok)?.clamp(1, capacity);
        if self.min_tokens > max_tokens {
            let min_tokens = self.min_tokens;
            let message = format!(
                "min_tokens is {min_tokens}, but at most {max_tokens} are generated: raise {}",
                self.names.max_tokens
            );
            return Err(ApiError::invalid("min_tokens", message));
        }
        if let Some(field) = self.logits_processors.as_ref().and_then(|all| all.ban()).filter(|_| grammar.is_some()) {
            let message =
                format!("{field} cannot be combined with structured output, a forced call or thinking_token_budget");
            return Err(ApiError::invalid(field, message).with_code("unsupported_parameter"));
        }
        let prompt: Arc<[u32]> = prompt.into();
        let request = |choice| {
            Ok(GenerateRequest {
                sampling: self.sampling.build(choice)?,
                logits_processors: self.logits_processors.clone(),
                grammar: grammar.clone(),
                stop_token_ids: self.stop_token_ids.clone(),
                ignore_eos: self.ignore_eos,
                logprobs,
                prompt_logprobs,
                vector: self.vector,
                priority: self.priority,
                tenant: self.tenant.id,
                cache_salt: self.cache_salt,
                adapter: self.adapter.clone(),
                engine: self.engine,
                only_if_cached: self.only_if_cached,
                ..GenerateRequest::greedy(prompt.clone(), max_tokens)
            })
        };
        (0..self.n as u64).map(request).collect()
    }
}

/// `n`, checked against `best_of`. A `best_of` above `n` would rank choices and return the best, which is not implemented.
fn choices(fields: &GenerationFields) -> Result<usize, ApiError> {
    let n = fields.n.map_or(1, |n| n.count());
    match fields.best_of {
        Some(best_of) if best_of.count() != n => {
            let best_of = best_of.count();
            let message = format!("best_of must be equal to n, which is {n}, got {best_of}: choices are not ranked");
            Err(ApiError::invalid("best_of", message).with_code("unsupported_parameter"))
        }
        _ => Ok(n),
    }
}

/// The client's name for the request: field `request_id`, else header `x-request-id`, else a random one.
fn request_id(given: Option<String>, headers: &HeaderMap) -> Result<String, ApiError> {
    match given {
        Some(id) if ids::is_valid(&id) => Ok(id),
        Some(_) => Err(ApiError::invalid("request_id", format!("request_id must be {}", ids::VALID))),
        None => ids::request_id(headers),
    }
}

/// The engine in the header `X-data-parallel-rank`, vLLM's name.
fn engine(headers: &HeaderMap) -> Result<Option<usize>, ApiError> {
    let Some(value) = headers.get(ENGINE_HEADER) else { return Ok(None) };
    let number = value.to_str().ok().and_then(|text| text.trim().parse().ok());
    let message = || format!("{ENGINE_HEADER} is the number of an engine, counted from 0");
    number.map(Some).ok_or_else(|| ApiError::invalid(ENGINE_HEADER, message()))
}

/// The priority, if clients may choose it.
fn priority(asked: i32, state: &ModelState) -> Result<i32, ApiError> {
    if asked != 0 && !state.options.limits.allow_priority {
        let message = "priority must be 0: this server does not accept priorities (--allow-priority)";
        return Err(ApiError::invalid("priority", message).with_code("unsupported_parameter"));
    }
    Ok(asked)
}

/// The hash of `cache_salt` and the API key. Only requests with the same salt share cached prefixes; 0 is no salt.
fn cache_salt(salt: Option<&str>, tenant: Tenant, state: &ModelState) -> Result<u64, ApiError> {
    let key = (tenant.has_key && !state.options.limits.share_prefix_cache).then_some(tenant.id);
    match (salt, key) {
        (Some(""), _) => Err(ApiError::invalid("cache_salt", "cache_salt must not be empty")),
        (None, None) => Ok(0),
        salted => Ok(state.hash_salt(salted)),
    }
}
