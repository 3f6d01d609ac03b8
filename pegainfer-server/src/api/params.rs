//! The parameters that completions and chats share, parsed and checked.

use super::fields::Fields;
use super::logits_processors;
use super::sampling::Sampling;
use super::state::AppState;
use super::stop;
use super::stream_options::StreamOptions;
use super::truncation::Truncation;
use crate::error::ApiError;
use crate::ids;
use crate::lifecycle::Deadline;
use crate::trace::Trace;
use crate::values::parse_seconds;
use axum::http::HeaderMap;
use pegainfer_core::engine::{self, GenerateRequest};
use pegainfer_core::grammar::Grammar;
use pegainfer_core::logits_processors::LogitsProcessors;
use std::sync::Arc;
use std::time::Instant;

/// Maximum number of choices for one prompt, as in OpenAI's API.
const MAX_N: i64 = 128;
/// Maximum number of most likely tokens that may be asked for at each position, as in OpenAI's chat API.
pub const MAX_LOGPROBS: i64 = engine::MAX_LOGPROBS as i64;

/// How to generate, whichever endpoint the request came through.
#[derive(Debug, Clone)]
pub struct Params {
    /// The model name that the client sent, or the canonical one.
    pub model: String,
    /// Becomes part of the response id.
    pub request_id: String,
    /// When the request is cancelled.
    pub deadline: Option<Deadline>,
    /// `None`: the response is one JSON object.
    pub stream: Option<StreamOptions>,
    /// Maximum number of tokens to generate, if the client gave one.
    pub max_tokens: Option<usize>,
    /// Number of choices for each prompt.
    pub n: usize,
    /// Minimum number of tokens to generate: until then neither EOS nor stop tokens are drawn, and stop strings are ignored.
    pub min_tokens: usize,
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// Token ids that end the text.
    pub stop_token_ids: Vec<u32>,
    /// Whether the stop string is part of the text.
    pub include_stop: bool,
    /// Whether special tokens are part of the text.
    pub show_special: bool,
    /// Whether the text begins with the prompt; completions only.
    pub echo: bool,
    /// Number of most likely tokens to report at each position of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// Whether to send token ids with the text.
    pub token_ids: bool,
    /// Whether log-probabilities name tokens by their ids.
    pub ids_as_text: bool,
    /// Whether to run the tokenizer's post-processor (BOS) over the prompt.
    pub add_special_tokens: Option<bool>,
    /// Whether the response reports the time of each stage.
    pub include_metrics: bool,
    /// When the whole body had arrived.
    pub received: Instant,
    /// Trace that records the stages of the request.
    pub trace: Option<Arc<Trace>>,
    sampling: Sampling,
    logits_processors: Option<Arc<LogitsProcessors>>,
    ignore_eos: bool,
    priority: i32,
    cache_salt: u64,
    truncation: Option<Truncation>,
}

impl Params {
    /// Parses the shared fields of a body.
    pub async fn parse(fields: &mut Fields, headers: &HeaderMap, state: &AppState) -> Result<Self, ApiError> {
        let received = Instant::now();
        let model = fields.string("model")?;
        let stream = StreamOptions::parse(fields)?;
        let prompt_logprobs = fields.integer("prompt_logprobs", 0..=MAX_LOGPROBS)?.map(|n| n as usize);
        if prompt_logprobs.is_some() && stream.is_some() {
            let message = "prompt_logprobs cannot be streamed: leave out \"stream\": true";
            return Err(ApiError::invalid("prompt_logprobs", message));
        }
        // `max_completion_tokens` is the newer name and wins.
        let newer = fields.integer("max_completion_tokens", 1..=i32::MAX.into())?;
        let older = fields.integer("max_tokens", 1..=i32::MAX.into())?;
        let limits = state.engine.limits();
        let stop_token_ids = stop::parse_token_ids(fields, limits.vocab_size)?;
        let ignore_eos = fields.bool("ignore_eos")?.unwrap_or(false);
        let min_tokens = fields.integer("min_tokens", 0..=i32::MAX.into())?.unwrap_or(0) as usize;
        let eos = limits.eos_token_ids.iter().filter(|_| !ignore_eos);
        let stops = eos.chain(&stop_token_ids).copied().collect();
        Ok(Self {
            model: state.model_named(model)?,
            request_id: parse_request_id(fields, headers)?,
            deadline: parse_deadline(headers, state)?,
            stream,
            max_tokens: newer.or(older).map(|n| n as usize),
            n: parse_n(fields)?,
            min_tokens,
            stop: stop::parse_strings(fields)?,
            stop_token_ids,
            include_stop: fields.bool("include_stop_str_in_output")?.unwrap_or(false),
            show_special: !fields.bool("skip_special_tokens")?.unwrap_or(true),
            echo: false,
            prompt_logprobs,
            token_ids: fields.bool("return_token_ids")?.unwrap_or(false),
            ids_as_text: fields.bool("return_tokens_as_token_ids")?.unwrap_or(false),
            add_special_tokens: fields.bool("add_special_tokens")?,
            include_metrics: fields.bool("include_metrics")?.unwrap_or(false),
            received,
            trace: fields.trace().cloned(),
            sampling: Sampling::parse(fields, state)?,
            logits_processors: logits_processors::parse(fields, state, min_tokens, stops).await?,
            ignore_eos,
            priority: fields.integer("priority", i32::MIN.into()..=i32::MAX.into())?.unwrap_or(0) as i32,
            cache_salt: parse_cache_salt(fields, state)?,
            truncation: Truncation::parse(fields)?,
        })
    }

    /// Whether the response needs the prompt.
    pub fn keeps_prompt(&self) -> bool {
        self.echo || self.prompt_logprobs.is_some() || self.token_ids
    }

    /// The engine's requests for one prompt, one for each choice. `default_max_tokens`: number of tokens to generate if the
    /// client gave none, limited by the context and the KV pool.
    pub fn requests(
        &self,
        mut prompt: Vec<u32>,
        default_max_tokens: usize,
        logprobs: Option<usize>,
        grammar: Option<Arc<dyn Grammar>>,
        state: &AppState,
    ) -> Result<Vec<GenerateRequest>, ApiError> {
        let limits = state.engine.limits();
        if let Some(truncation) = self.truncation {
            truncation.apply(&mut prompt, limits.max_model_len.saturating_sub(self.max_tokens.unwrap_or(1)));
        }
        // An echoed prompt has log-probabilities like the text that follows it.
        let prompt_logprobs = self.prompt_logprobs.max(logprobs.filter(|_| self.echo));
        let context = limits.max_model_len.saturating_sub(prompt.len());
        let pool = (limits.kv_capacity_tokens() + 1).saturating_sub(prompt.len());
        // At least 1, so that the engine's own check refuses a prompt that fills the context.
        let capacity = context.min(pool).max(1);
        let max_tokens = self.max_tokens.unwrap_or(default_max_tokens.min(capacity));
        if self.min_tokens > max_tokens {
            let min_tokens = self.min_tokens;
            let message =
                format!("min_tokens is {min_tokens}, but at most {max_tokens} are generated: raise max_tokens");
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
                priority: self.priority,
                cache_salt: self.cache_salt,
                ..GenerateRequest::greedy(prompt.clone(), max_tokens)
            })
        };
        (0..self.n as u64).map(request).collect()
    }
}

/// Parses `n` and `best_of`. A `best_of` above `n` would rank choices and return the best, which is not implemented.
fn parse_n(fields: &mut Fields) -> Result<usize, ApiError> {
    let n = fields.integer("n", 1..=MAX_N)?.unwrap_or(1);
    match fields.integer("best_of", 1..=MAX_N)? {
        Some(best_of) if best_of != n => {
            let message = format!("best_of must be equal to n, which is {n}, got {best_of}: choices are not ranked");
            Err(ApiError::invalid("best_of", message).with_code("unsupported_parameter"))
        }
        _ => Ok(n as usize),
    }
}

/// Parses the client's name for the request: field `request_id`, else header `x-request-id`, else a random one.
fn parse_request_id(fields: &mut Fields, headers: &HeaderMap) -> Result<String, ApiError> {
    match fields.string("request_id")? {
        Some(id) if ids::is_valid(&id) => Ok(id),
        Some(_) => Err(ApiError::invalid("request_id", format!("request_id must be {}", ids::VALID))),
        None => ids::request_id(headers),
    }
}

/// The server's time limit, or the client's (`x-request-timeout`) if that is shorter.
fn parse_deadline(headers: &HeaderMap, state: &AppState) -> Result<Option<Deadline>, ApiError> {
    let asked = match headers.get("x-request-timeout") {
        None => None,
        Some(value) => {
            let seconds = parse_seconds(value.to_str().unwrap_or_default());
            Some(seconds.map_err(|e| ApiError::invalid("x-request-timeout", format!("x-request-timeout: {e}")))?)
        }
    };
    Ok(asked.into_iter().chain(state.options.request_timeout).min().map(Deadline::after))
}

/// Parses `cache_salt`. Requests share cached prefixes only under the same salt; 0 is no salt.
fn parse_cache_salt(fields: &mut Fields, state: &AppState) -> Result<u64, ApiError> {
    match fields.string("cache_salt")? {
        None => Ok(0),
        Some(salt) if salt.is_empty() => Err(ApiError::invalid("cache_salt", "cache_salt must not be empty")),
        Some(salt) => Ok(state.hash_salt(&salt)),
    }
}
