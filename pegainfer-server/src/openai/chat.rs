//! `POST /v1/chat/completions`.

use super::errors::ApiError;
use super::fields::Fields;
use super::generation::{Generation, Piece};
use super::logprobs::ChatLogprobs;
use super::params::{MAX_LOGPROBS, Params};
use super::sse::{self, ChunkFormat, Events};
use super::state::{AppState, unix_time};
use super::wire::{ChatChoice, ChatChunkChoice, ChatDelta, ChatMessage, Envelope, Usage};
use super::{body, messages, with_ignored};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use futures_util::future::try_join_all;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Template arguments that `chat_template_kwargs` must not replace.
const RESERVED_KWARGS: [&str; 5] = ["messages", "tools", "add_generation_prompt", "chat_template", "tokenize"];

/// The handler.
pub async fn chat(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (headers, mut fields) = body::read(request).await?;
    let params = Params::take(&mut fields, &headers, &state)?;
    let conversation = Conversation::take(&mut fields)?;
    let logprobs = take_logprobs(&mut fields)?;
    let ignored = state.policy.judge(&fields.rest())?;

    let prompt = conversation.render(&state)?;
    let mut ids = state.encode(vec![prompt], params.add_special_tokens.unwrap_or(false), "messages").await?;
    let requests = params.requests(ids.pop().unwrap_or_default(), usize::MAX, logprobs, &state)?;
    let generations = Generation::submit_all(&state, &params, requests, "chat", "messages")?;
    let format = Format {
        id: format!("chatcmpl-{}", params.request_id),
        created: unix_time(),
        model: params.model,
        logprobs: logprobs.is_some(),
        opened: vec![false; params.n],
        state,
    };
    let response = match params.stream {
        Some(options) => sse::respond(generations, params.n, format, options).await?,
        None => respond(generations, format).await?,
    };
    Ok(with_ignored(response, ignored))
}

struct Conversation {
    messages: Vec<Value>,
    add_generation_prompt: bool,
    kwargs: Map<String, Value>,
}

impl Conversation {
    fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        let kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
        if let Some(name) = RESERVED_KWARGS.iter().find(|&&name| kwargs.contains_key(name)) {
            let message = format!("chat_template_kwargs must not hold {name}");
            return Err(ApiError::invalid("chat_template_kwargs", message));
        }
        Ok(Self {
            messages: messages::take(fields)?,
            add_generation_prompt: fields.bool("add_generation_prompt")?.unwrap_or(true),
            kwargs,
        })
    }

    fn render(&self, state: &AppState) -> Result<String, ApiError> {
        let Some(template) = &state.checkpoint.template else {
            let message = "this model has no chat template: use /v1/completions";
            return Err(ApiError::invalid("messages", message));
        };
        template
            .render(&self.messages, None, self.add_generation_prompt, &self.kwargs)
            .map_err(|e| ApiError::invalid("messages", e.to_string()))
    }
}

/// `logprobs` turns them on, `top_logprobs` says how many.
fn take_logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let wanted = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=MAX_LOGPROBS)?.unwrap_or(0) as usize;
    if top > 0 && !wanted {
        return Err(ApiError::invalid("top_logprobs", "top_logprobs needs \"logprobs\": true"));
    }
    Ok(wanted.then_some(top))
}

struct Format {
    id: String,
    created: u64,
    model: String,
    logprobs: bool,
    /// For each choice, whether the chunk with the role was sent.
    opened: Vec<bool>,
    state: Arc<AppState>,
}

impl Format {
    fn envelope<C>(&self, object: &'static str, choices: Vec<C>, usage: Option<Option<Usage>>) -> Envelope<'_, C> {
        Envelope { id: &self.id, object, created: self.created, model: &self.model, choices, usage }
    }

    fn chunk(&self, out: &mut Events, choices: Vec<ChatChunkChoice>, usage: Option<Option<Usage>>) {
        out.push(&self.envelope("chat.completion.chunk", choices, usage));
    }

    fn logprobs(&self, piece: &Piece) -> Option<ChatLogprobs> {
        self.logprobs.then(|| ChatLogprobs::of(piece, &self.state.checkpoint.tokenizer))
    }
}

impl ChunkFormat for Format {
    fn piece(&mut self, out: &mut Events, index: usize, piece: Piece, usage: Option<Option<Usage>>) {
        if !std::mem::replace(&mut self.opened[index], true) {
            let delta = ChatDelta { role: Some("assistant"), content: String::new() };
            let usage = usage.as_ref().map(|_| None);
            self.chunk(out, vec![ChatChunkChoice { index, delta, logprobs: None, end: None.into() }], usage);
        }
        let logprobs = self.logprobs(&piece);
        let delta = ChatDelta { role: None, content: piece.text };
        self.chunk(out, vec![ChatChunkChoice { index, delta, logprobs, end: piece.finish.into() }], usage);
    }

    fn usage(&mut self, out: &mut Events, usage: Usage) {
        self.chunk(out, vec![], Some(Some(usage)));
    }
}

/// Waits for all choices. The first failure drops, and so cancels, the others.
async fn respond(mut generations: Vec<Generation>, format: Format) -> Result<Response, ApiError> {
    let collected = generations.iter_mut().enumerate().map(|(index, generation)| collect(index, generation, &format));
    let choices = try_join_all(collected).await?;
    let usage = Usage::sum(generations.iter().map(Generation::counts), choices.len());
    Ok(Json(format.envelope("chat.completion", choices, Some(Some(usage)))).into_response())
}

async fn collect(index: usize, generation: &mut Generation, format: &Format) -> Result<ChatChoice, ApiError> {
    let message = ChatMessage { role: "assistant", content: String::new() };
    let mut choice = ChatChoice { index, message, logprobs: None, end: None.into() };
    while let Some(piece) = generation.next().await {
        let piece = piece?;
        if let Some(logprobs) = format.logprobs(&piece) {
            choice.logprobs.get_or_insert_default().extend(logprobs);
        }
        choice.message.content += &piece.text;
        choice.end = piece.finish.into();
    }
    Ok(choice)
}
