//! A completion of texts or token ids, whichever endpoint it came through.

use super::body::RequestContext;
use super::conversation::FieldNames;
use super::generation::Generation;
use super::model_state::ModelState;
use super::params::Params;
use super::policy::FieldPolicy;
use super::schema::Body;
use super::schema::completions::{CompletionFields, PromptInput};
use super::schema::generation::GenerationFields;
use super::schema::sampling::SamplingFields;
use super::state::AppState;
use super::stop::check_vocabulary;
use super::structured::Structured;
use crate::error::ApiError;
use crate::text_service::encode;
use axum::http::HeaderValue;
use pegainfer_core::engine::GenerateRequest;
use std::sync::Arc;

/// Maximum number of choices of one request, over all prompts.
const MAX_CHOICES: usize = 256;

/// A parsed body.
pub struct CompletionRequest {
    /// How much to generate, and what to report.
    pub generation: GenerationFields,
    /// How to draw tokens.
    pub sampling: SamplingFields,
    /// Structure of the output.
    pub structured: Option<Structured>,
    /// Prompts and what to report of them.
    pub fields: CompletionFields,
    /// Name of the field with the prompts, for errors.
    pub prompt_field: &'static str,
    /// Maximum number of tokens to generate if the request has none.
    pub default_max_tokens: usize,
    /// Value of the header `x-ignored-fields`.
    pub ignored: Option<HeaderValue>,
}

impl CompletionRequest {
    /// OpenAI's default of `max_tokens`.
    const DEFAULT_MAX_TOKENS: usize = 16;

    /// Reads a body of `/v1/completions`.
    pub fn read(bytes: &[u8], policy: &FieldPolicy) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        let (generation, sampling, structure, fields) = (body.read()?, body.read()?, body.read()?, body.read()?);
        let ignored = policy.check(&body)?;
        let structured = Structured::read(structure)?;
        let default_max_tokens = Self::DEFAULT_MAX_TOKENS;
        Ok(Self { generation, sampling, structured, fields, prompt_field: "prompt", default_max_tokens, ignored })
    }
}

/// What is generated, and from what, for given [`Params`].
pub struct CompletionInput {
    /// The prompts.
    pub prompts: PromptInput,
    /// Structure of the output.
    pub structured: Option<Structured>,
    /// Number of most likely tokens to report at each position; `None` reports no log-probabilities.
    pub logprobs: Option<usize>,
    /// Name of the field with the prompts, for errors.
    pub prompt_field: &'static str,
    /// Maximum number of tokens to generate if the request has none.
    pub default_max_tokens: usize,
}

/// A completion with tokenized prompts.
pub struct Completion {
    /// The model that has the request.
    pub model: ModelState,
    /// Parameters of the request.
    pub params: Params,
    /// Token ids of the prompts.
    pub prompts: Vec<Vec<u32>>,
    /// Structure of the output, as Lark.
    pub structured: Option<Structured>,
    /// Number of most likely tokens to report at each position; `None` reports no log-probabilities.
    pub logprobs: Option<usize>,
    /// Value of the header `x-ignored-fields`.
    pub ignored: Option<HeaderValue>,
    prompt_field: &'static str,
    default_max_tokens: usize,
}

impl Completion {
    /// Checks a request and tokenizes its prompts.
    pub async fn new(
        request: CompletionRequest,
        context: &RequestContext,
        server: &Arc<AppState>,
    ) -> Result<Self, ApiError> {
        let CompletionRequest { mut generation, sampling, structured, fields, prompt_field, .. } = request;
        let CompletionFields { prompt, logprobs, echo } = fields;
        let (ignored, default_max_tokens) = (request.ignored, request.default_max_tokens);
        let model = ModelState::named(server, generation.wanted(), context, ignored.as_ref()).await?;
        let mut params = Params::new(generation, sampling, &FieldNames::CHAT, context, &model).await?;
        if params.stream.is_some() {
            context.announce_stream(ignored.as_ref());
        }
        params.echo = echo.unwrap_or(false);
        let logprobs = logprobs.map(|n| n.count());
        let prompts = prompt.ok_or_else(|| ApiError::invalid(prompt_field, format!("{prompt_field} is missing")))?;
        let choices = prompts.count() * params.n;
        if choices > MAX_CHOICES {
            let message = format!("n asks for {choices} choices over all prompts; the maximum is {MAX_CHOICES}");
            return Err(ApiError::invalid("n", message));
        }
        let input = CompletionInput { prompts, structured, logprobs, prompt_field, default_max_tokens };
        Self::with_params((model, params), input, ignored, context).await
    }

    /// Tokenizes the prompts of a request to a model, whose parameters are known.
    pub async fn with_params(
        (model, params): (ModelState, Params),
        input: CompletionInput,
        ignored: Option<HeaderValue>,
        context: &RequestContext,
    ) -> Result<Self, ApiError> {
        let CompletionInput { prompts, structured, logprobs, prompt_field, default_max_tokens } = input;
        let prompts = tokenized(prompts, prompt_field, &params, context, &model).await?;
        let structured = match structured {
            // Listing the names of a schema's patterns takes a tenth of a second for the largest small body.
            Some(structured) => Some(context.hold.work(&model, move |_| structured.into_lark()).await??),
            None => None,
        };
        Ok(Self { model, params, prompts, structured, logprobs, ignored, prompt_field, default_max_tokens })
    }

    /// The engine's requests for one prompt, without a grammar.
    pub fn requests(&self, prompt: Vec<u32>) -> Result<Vec<GenerateRequest>, ApiError> {
        self.params.requests(prompt, self.default_max_tokens, self.logprobs, None, &self.model)
    }

    /// Name of the field with the prompts, for errors.
    pub fn prompt_field(&self) -> &'static str {
        self.prompt_field
    }

    /// Submits the choices of all prompts, prompt by prompt.
    pub async fn submit(&mut self, context: &RequestContext) -> Result<Vec<Generation>, ApiError> {
        let (prompts, structured) = (std::mem::take(&mut self.prompts), self.structured.take());
        let prompt_bytes = prompts.iter().map(|ids| size_of_val(ids.as_slice())).sum();
        let grammar = Structured::compile(structured, prompt_bytes, context, &self.model).await?;
        let grammar = self.model.model.text.grammars.for_engine(None, grammar);
        let of_prompt =
            |ids| self.params.requests(ids, self.default_max_tokens, self.logprobs, grammar.clone(), &self.model);
        let requests = prompts.into_iter().map(of_prompt).collect::<Result<Vec<_>, _>>()?.concat();
        Generation::submit_all(&self.model, &self.params, requests, self.prompt_field)
    }
}

/// Token ids of the prompts; texts are tokenized off the async threads.
async fn tokenized(
    prompts: PromptInput,
    field: &'static str,
    params: &Params,
    context: &RequestContext,
    model: &ModelState,
) -> Result<Vec<Vec<u32>>, ApiError> {
    match prompts {
        PromptInput::Ids(prompts) => {
            let vocab_size = model.model.engine.limits().vocab_size;
            for ids in &prompts {
                check_vocabulary(ids, vocab_size, field)?;
                model.refuse_image_tokens(ids, field)?;
            }
            Ok(prompts)
        }
        PromptInput::Texts(texts) if texts.is_empty() => {
            Err(ApiError::invalid(field, "the prompt is empty: send at least one token"))
        }
        PromptInput::Texts(texts) => {
            if !params.is_truncated() {
                texts.iter().try_for_each(|text| model.check_length(text.len(), field))?;
            }
            let encode = encode(texts, params.add_special_tokens.unwrap_or(true));
            let encoded = model.tokenize(&context.hold, encode).await?;
            let prompts = encoded.map_err(|error| ApiError::invalid(field, error.to_string()))?;
            prompts.iter().try_for_each(|ids| model.refuse_image_tokens(ids, field))?;
            Ok(prompts)
        }
    }
}
