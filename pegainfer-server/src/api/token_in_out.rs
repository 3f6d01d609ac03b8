//! `POST /inference/v1/generate`: token ids in, token ids out, in the shape of vLLM.

use super::body;
use super::completion::{Completion, CompletionRequest};
use super::delta::{ChoiceOutput, Counts, Delta};
use super::generation::Generation;
use super::large_response::{GrowingResponse, json_bytes};
use super::logprobs::{ChatLogprobs, TokenNames};
use super::model_state::ModelState;
use super::params::Params;
use super::policy::{FieldPolicy, with_ignored};
use super::schema::Body;
use super::schema::completions::{CompletionFields, PromptInput};
use super::schema::generation::GenerationFields;
use super::schema::numbers::{Int, TokenId};
use super::schema::sampling::SamplingFields;
use super::schema::structure::StructureFields;
use super::schema::token_in_out::{ChoiceFields, OF_REQUEST, OutputMode, SAMPLING_PARAMS, TokenInOutFields};
use super::sse::{self, ChunkWriter, Events};
use super::state::{AppState, unix_time};
use super::structured::Structured;
use super::timings::Timings;
use super::wire::{ChunkUsage, FinishFields, PromptFields, Usage};
use crate::error::ApiError;
use axum::extract::{Request, State};
use axum::response::Response;
use futures_util::future::try_join_all;
use schemars::JsonSchema;
use serde::Serialize;
use std::sync::Arc;

/// Handles `POST /inference/v1/generate`. The request runs like one of `/v1/completions` with a prompt of token ids.
pub async fn generate(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (context, bytes) = body::read(request, &state).await?;
    let shared = state.clone();
    let (request, has_text) = bytes.parse(&state, move |bytes| read(bytes, &shared.policy)).await?;
    let mut completion = Completion::new(request, &context, &state).await?;
    let generations = completion.submit(&context).await?;
    let submitted = context.submitted();
    let Completion { model, params, logprobs, ignored, .. } = completion;
    let id = format!("generate-tokens-{}", params.request_id);
    let writer = TokenWriter { id, created: unix_time(), has_text, logprobs: logprobs.is_some(), params, state: model };
    let response = match writer.params.stream {
        Some(_) => {
            let n = writer.params.n;
            sse::respond(state, submitted, generations, n, writer).await?
        }
        None => respond(generations, writer).await?,
    };
    Ok(with_ignored(response, ignored))
}

/// Reads a body. The flag is true if choices have texts.
fn read(bytes: &[u8], policy: &FieldPolicy) -> Result<(CompletionRequest, bool), ApiError> {
    let mut body = Body::parse(bytes)?;
    let fields: TokenInOutFields = body.read()?;
    let mut params = body.object(SAMPLING_PARAMS)?;
    let (choices, sampling): (ChoiceFields, SamplingFields) = (params.read()?, params.read()?);
    for name in OF_REQUEST {
        if params.has(name) {
            params.ignore(params.full_name(name));
        }
    }
    let ignored = policy.check_all(&[&params, &body])?;
    let ids: Vec<u32> = fields.token_ids.unwrap_or_default().into_iter().map(|TokenId(id)| id).collect();
    if ids.is_empty() {
        return Err(ApiError::invalid("token_ids", "token_ids is missing or empty: send at least one token"));
    }
    let generation = GenerationFields {
        model: fields.model,
        stream: fields.stream,
        stream_options: fields.stream_options,
        max_tokens: choices.max_tokens.map(|max| Int(max.0)),
        n: choices.n,
        stop: choices.stop,
        include_stop_str_in_output: choices.include_stop_str_in_output,
        prompt_logprobs: choices.prompt_logprobs,
        return_token_ids: fields.return_token_ids,
        ..GenerationFields::default()
    };
    let (priority, cache_salt, request_id) = (fields.priority, fields.cache_salt, fields.request_id);
    let structure = StructureFields { structured_outputs: choices.structured_outputs, ..StructureFields::default() };
    let request = CompletionRequest {
        generation,
        sampling: SamplingFields { priority, cache_salt, request_id, ..sampling },
        structured: Structured::read(structure)?,
        fields: CompletionFields { prompt: Some(PromptInput::Ids(vec![ids])), logprobs: choices.logprobs, echo: None },
        prompt_field: "token_ids",
        // As in vLLM: the rest of the context.
        default_max_tokens: usize::MAX,
        ignored,
    };
    Ok((request, fields.output_mode == Some(OutputMode::Text)))
}

/// A whole response.
#[derive(Serialize, JsonSchema)]
pub struct TokenResponse<'a> {
    /// `generate-tokens-…`.
    request_id: &'a str,
    /// Unix time.
    created: u64,
    /// Model name that the client used.
    model: &'a str,
    /// The choices.
    choices: Vec<TokenChoice>,
    /// Token counts of all choices.
    usage: Usage,
    /// Prompt fields, if the client asked for them.
    #[serde(flatten)]
    prompt: Option<PromptFields>,
    /// Always null: KV is not transferred.
    kv_transfer_params: (),
}

/// A chunk of a streamed response.
#[derive(Serialize, JsonSchema)]
pub struct TokenChunk<'a> {
    /// The same in all chunks: `generate-tokens-…`.
    request_id: &'a str,
    /// One choice; none in the chunk that has only counts.
    choices: Vec<TokenChoice>,
    /// Prompt fields, in the first chunk.
    #[serde(flatten)]
    prompt: Option<PromptFields>,
    /// Token counts, as `stream_options` asks for them.
    #[serde(skip_serializing_if = "ChunkUsage::is_absent")]
    #[schemars(with = "Option<Usage>")]
    usage: ChunkUsage,
}

/// A choice of tokens, whole or as a chunk.
#[derive(Serialize, JsonSchema)]
pub struct TokenChoice {
    /// Index of the choice.
    index: usize,
    /// Log-probabilities, if the client asked for them. Without text, tokens are named `token_id:N`.
    logprobs: Option<ChatLogprobs>,
    /// Why the choice ended.
    #[serde(flatten)]
    finish: FinishFields,
    /// Token ids, the stop token included.
    token_ids: Vec<u32>,
    /// The text, or in a chunk the next part of it, with `"output_mode": "text"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
}

struct TokenWriter {
    id: String,
    created: u64,
    /// True if choices have texts.
    has_text: bool,
    logprobs: bool,
    params: Params,
    state: ModelState,
}

impl TokenWriter {
    /// A choice, or the part of it in one delta, and the prompt fields that come with it.
    fn choice(&self, index: usize, output: ChoiceOutput) -> (TokenChoice, Option<PromptFields>) {
        let ChoiceOutput { text, tokens, prompt, finish } = output;
        let tokenizer = &*self.state.model.text.checkpoint.tokenizer;
        let names = TokenNames { tokenizer, by_id: !self.has_text };
        let logprobs = self.logprobs.then(|| ChatLogprobs::new(tokens.iter().map(|(token, _)| token), &names));
        let prompt = prompt.as_ref().and_then(|prompt| PromptFields::new(prompt, &self.params, tokenizer));
        let token_ids = tokens.iter().map(|(token, _)| token.id).collect();
        let text = self.has_text.then_some(text);
        (TokenChoice { index, logprobs, finish: finish.into(), token_ids, text }, prompt)
    }
}

impl ChunkWriter for TokenWriter {
    fn delta(&mut self, out: &mut Events, index: usize, delta: Delta, counts: Counts) {
        let mut output = ChoiceOutput::default();
        output.push(delta, true);
        let options = self.params.stream.unwrap_or_default();
        let usage = ChunkUsage::running_total(options, || Usage::sum([counts], 1));
        let (choice, prompt) = self.choice(index, output);
        let prompt = prompt.filter(|_| index == 0);
        out.push(&TokenChunk { request_id: &self.id, choices: vec![choice], prompt, usage });
    }

    /// Writes one more chunk, with only the counts, if the client asked for them.
    fn finish(&mut self, out: &mut Events, usage: Usage, _metrics: Option<Timings>) {
        if self.params.stream.is_some_and(|options| options.include_usage) {
            let usage = ChunkUsage::Counts(usage);
            out.push(&TokenChunk { request_id: &self.id, choices: vec![], prompt: None, usage });
        }
    }
}

/// Waits for all choices. The first failure drops the others, which cancels them.
async fn respond(mut generations: Vec<Generation>, writer: TokenWriter) -> Result<Response, ApiError> {
    let growing = GrowingResponse::new(writer.params.tenant);
    let state = writer.state.clone();
    let collected = generations.iter_mut().map(|generation| generation.collect(true, &growing, &state));
    let outputs = try_join_all(collected).await?;
    let usage = Usage::sum(generations.iter().map(Generation::counts), writer.params.n);
    let write = move || {
        let choices = outputs.into_iter().enumerate().map(|(index, output)| writer.choice(index, output));
        let (choices, prompts): (Vec<_>, Vec<_>) = choices.unzip();
        let prompt = prompts.into_iter().next().flatten();
        let (request_id, created, model) = (writer.id.as_str(), writer.created, writer.params.model.as_str());
        json_bytes(&TokenResponse { request_id, created, model, choices, usage, prompt, kv_transfer_params: () })
    };
    growing.respond(&state, write).await
}
