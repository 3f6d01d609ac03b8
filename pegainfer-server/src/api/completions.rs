//! `POST /v1/completions`.

use super::body;
use super::conversation::FieldNames;
use super::delta::{ChoiceOutput, Counts, Delta};
use super::generation::Generation;
use super::large_response::{GrowingResponse, json_bytes};
use super::logprobs::{CompletionLogprobs, TokenNames};
use super::params::Params;
use super::policy::{FieldPolicy, with_ignored};
use super::schema::Body;
use super::schema::completions::{CompletionFields, PromptInput};
use super::schema::generation::GenerationFields;
use super::schema::sampling::SamplingFields;
use super::sse::{self, ChunkWriter, Events};
use super::state::{AppState, unix_time};
use super::stop::check_vocabulary;
use super::structured::Structured;
use super::timings::Timings;
use super::wire::{Chunk, ChunkUsage, CompletionChoice, Envelope, PromptFields, Usage};
use crate::error::ApiError;
use crate::text_service::encode;
use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::response::Response;
use futures_util::future::try_join_all;
use std::sync::Arc;

/// OpenAI's default of `max_tokens`.
const DEFAULT_MAX_TOKENS: usize = 16;
/// Object type of responses and chunks.
const OBJECT: &str = "text_completion";
/// Maximum number of choices of one request, over all prompts.
const MAX_CHOICES: usize = 256;

/// Handles `POST /v1/completions`.
pub async fn completions(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (context, bytes) = body::read(request, &state).await?;
    let shared = state.clone();
    let parts = bytes.parse(&state, move |bytes| read(bytes, &shared.policy)).await?;
    let CompletionBody { generation, sampling, structured, fields, ignored } = parts;
    let CompletionFields { prompt, logprobs, echo } = fields;
    let mut params = Params::new(generation, sampling, &FieldNames::CHAT, &context, &state).await?;
    if params.stream.is_some() {
        context.announce_stream(ignored.as_ref());
    }
    params.echo = echo.unwrap_or(false);
    let logprobs = logprobs.map(|n| n.count());

    let choices = prompt.as_ref().map_or(0, PromptInput::count) * params.n;
    if choices > MAX_CHOICES {
        let message = format!("n asks for {choices} choices over all prompts; the maximum is {MAX_CHOICES}");
        return Err(ApiError::invalid("n", message));
    }
    let prompts = match prompt {
        None => return Err(ApiError::invalid("prompt", "prompt is missing")),
        Some(PromptInput::Ids(prompts)) => {
            for ids in &prompts {
                check_vocabulary(ids, state.engine.limits().vocab_size, "prompt")?;
            }
            prompts
        }
        Some(PromptInput::Texts(texts)) if texts.is_empty() => {
            return Err(ApiError::invalid("prompt", "the prompt is empty: send at least one token"));
        }
        Some(PromptInput::Texts(texts)) => {
            if !params.is_truncated() {
                texts.iter().try_for_each(|text| state.check_length(text.len(), "prompt"))?;
            }
            let encode = encode(texts, params.add_special_tokens.unwrap_or(true));
            context.hold.work(&state, encode).await?.map_err(|error| ApiError::invalid("prompt", error.to_string()))?
        }
    };
    let structured = match structured {
        // Listing the names of a schema's patterns takes a tenth of a second for the largest small body.
        Some(structured) => Some(context.hold.work(&state, move |_, _| structured.into_lark()).await??),
        None => None,
    };
    let prompt_bytes = prompts.iter().map(|ids| size_of_val(ids.as_slice())).sum();
    let grammar = Structured::compile(structured, prompt_bytes, &context, &state).await?;
    let grammar = state.grammars.for_engine(None, grammar);
    let requests = prompts.into_iter();
    let requests = requests.map(|ids| params.requests(ids, DEFAULT_MAX_TOKENS, logprobs, grammar.clone(), &state));
    let requests = requests.collect::<Result<Vec<_>, _>>()?.concat();
    let generations = Generation::submit_all(&state, &params, requests, "prompt")?;
    let submitted = context.submitted();
    let writer = CompletionWriter {
        id: format!("cmpl-{}", params.request_id),
        created: unix_time(),
        logprobs: logprobs.is_some(),
        params,
        state,
    };
    let response = match writer.params.stream {
        Some(_) => {
            let n = writer.params.n;
            sse::respond(writer.state.clone(), submitted, generations, n, writer).await?
        }
        None => respond(generations, writer).await?,
    };
    Ok(with_ignored(response, ignored))
}

/// A parsed body.
struct CompletionBody {
    generation: GenerationFields,
    sampling: SamplingFields,
    structured: Option<Structured>,
    fields: CompletionFields,
    /// Value of the header `x-ignored-fields`.
    ignored: Option<HeaderValue>,
}

fn read(bytes: &[u8], policy: &FieldPolicy) -> Result<CompletionBody, ApiError> {
    let mut body = Body::parse(bytes)?;
    let (generation, sampling, structure, fields) = (body.read()?, body.read()?, body.read()?, body.read()?);
    let ignored = policy.check(&body)?;
    Ok(CompletionBody { generation, sampling, structured: Structured::read(structure)?, fields, ignored })
}

struct CompletionWriter {
    id: String,
    created: u64,
    logprobs: bool,
    params: Params,
    state: Arc<AppState>,
}

impl CompletionWriter {
    fn chunk(&self, out: &mut Events, choices: Vec<CompletionChoice>, usage: ChunkUsage, metrics: Option<Timings>) {
        let (object, model) = (OBJECT, self.params.model.as_str());
        out.push(&Chunk { id: &self.id, object, created: self.created, model, choices, prompt: None, usage, metrics });
    }

    /// True if the response shows more of the tokens than their text.
    fn keeps_tokens(&self) -> bool {
        self.logprobs || self.params.token_ids
    }

    /// A choice, or the part of it in one delta.
    fn choice(&self, index: usize, output: ChoiceOutput) -> CompletionChoice {
        let ChoiceOutput { text, tokens, prompt, finish } = output;
        let tokenizer = &*self.state.checkpoint.tokenizer;
        let names = TokenNames { tokenizer, by_id: self.params.ids_as_text };
        let echoed = prompt.as_ref().filter(|_| self.params.echo);
        let logprobs = self.logprobs.then(|| CompletionLogprobs::new(echoed, &tokens, &names));
        let text = echoed.map_or(String::new(), |prompt| tokenizer.decode_all(&prompt.ids)) + &text;
        let prompt = prompt.as_ref().and_then(|prompt| PromptFields::new(prompt, &self.params, tokenizer));
        let token_ids = self.params.token_ids.then(|| tokens.iter().map(|(token, _)| token.id).collect());
        CompletionChoice { index, text, logprobs, prompt, finish: finish.into(), token_ids }
    }
}

impl ChunkWriter for CompletionWriter {
    fn delta(&mut self, out: &mut Events, index: usize, delta: Delta, counts: Counts) {
        let mut output = ChoiceOutput::default();
        output.push(delta, self.keeps_tokens());
        let options = self.params.stream.unwrap_or_default();
        let usage = ChunkUsage::running_total(options, || Usage::sum([counts], 1));
        self.chunk(out, vec![self.choice(index, output)], usage, None);
    }

    /// Writes one more chunk, with only the counts, if the client asked for them.
    fn finish(&mut self, out: &mut Events, usage: Usage, metrics: Option<Timings>) {
        if self.params.stream.is_some_and(|options| options.include_usage) || metrics.is_some() {
            self.chunk(out, vec![], ChunkUsage::Counts(usage), metrics);
        }
    }
}

/// Waits for all choices. The first failure drops the others, which cancels them.
async fn respond(mut generations: Vec<Generation>, writer: CompletionWriter) -> Result<Response, ApiError> {
    let growing = GrowingResponse::new(writer.params.tenant);
    let collected = generations.iter_mut().map(|generation| collect(generation, &writer, &growing));
    let outputs = try_join_all(collected).await?;
    let usage = Usage::sum(generations.iter().map(Generation::counts), writer.params.n);
    let metrics = generations.first().and_then(Generation::timings);
    let state = writer.state.clone();
    let write = move || {
        let choices = outputs.into_iter().enumerate().map(|(index, output)| writer.choice(index, output)).collect();
        let (id, created, model) = (writer.id.as_str(), writer.created, writer.params.model.as_str());
        json_bytes(&Envelope { id, object: OBJECT, created, model, choices, prompt: None, usage, metrics })
    };
    growing.respond(&state, write).await
}

async fn collect(
    generation: &mut Generation,
    writer: &CompletionWriter,
    growing: &GrowingResponse,
) -> Result<ChoiceOutput, ApiError> {
    let mut output = ChoiceOutput::default();
    while let Some(delta) = generation.next().await {
        let delta = delta?;
        growing.add(&delta, &writer.state)?;
        output.push(delta, writer.keeps_tokens());
    }
    Ok(output)
}
