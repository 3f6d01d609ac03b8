//! `POST /v1/chat/completions`.

use super::answer::Message;
use super::errors::ApiError;
use super::exchange::{Exchange, Reader};
use super::generation::Generation;
use super::logprobs::{ChatLogprobs, TokenNames};
use super::params::Params;
use super::piece::{Piece, Prompt};
use super::sse::{self, ChunkFormat, Events};
use super::state::{AppState, unix_time};
use super::timings::Timings;
use super::wire::{ChatChoice, ChatChunkChoice, Envelope, PromptFields, Usage};
use super::{body, with_ignored};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use futures_util::future::try_join_all;
use std::sync::Arc;

/// The handler.
pub async fn chat(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (headers, fields) = body::read(request, &state.options).await?;
    let Exchange { params, generations, readers, logprobs, ignored } =
        Exchange::start(fields, &headers, &state, "chat").await?;
    let format = Format {
        id: format!("chatcmpl-{}", params.request_id),
        created: unix_time(),
        logprobs,
        readers: readers.into_iter().map(|reader| (reader, false)).collect(),
        params,
        state,
    };
    let response = match format.params.stream {
        Some(options) => sse::respond(generations, format.params.n, format, options).await?,
        None => respond(generations, format).await?,
    };
    Ok(with_ignored(response, ignored))
}

struct Format {
    id: String,
    created: u64,
    logprobs: bool,
    /// One for each choice, and whether its chunk with the role was sent.
    readers: Vec<(Reader, bool)>,
    params: Params,
    state: Arc<AppState>,
}

impl Format {
    fn envelope<C>(&self, object: &'static str, choices: Vec<C>, usage: Option<Option<Usage>>) -> Envelope<'_, C> {
        let model = self.params.model.as_str();
        Envelope { id: &self.id, object, created: self.created, model, choices, prompt: None, usage, metrics: None }
    }

    fn chunk(&self, out: &mut Events, choice: ChatChunkChoice, prompt: Option<Prompt>, usage: Option<Option<Usage>>) {
        let envelope = self.envelope("chat.completion.chunk", vec![choice], usage);
        out.push(&Envelope { prompt: self.prompt(prompt.as_ref()), ..envelope });
    }

    fn prompt(&self, prompt: Option<&Prompt>) -> Option<PromptFields> {
        PromptFields::of(prompt?, &self.params, &self.state.checkpoint.tokenizer)
    }

    fn logprobs(&self, piece: &Piece) -> Option<ChatLogprobs> {
        let names = TokenNames { tokenizer: &self.state.checkpoint.tokenizer, by_id: self.params.ids_as_text };
        self.logprobs.then(|| ChatLogprobs::of(piece, &names))
    }

    fn token_ids(&self, piece: &Piece) -> Option<Vec<u32>> {
        self.params.token_ids.then(|| piece.token.iter().map(|token| token.id).collect())
    }
}

impl ChunkFormat for Format {
    fn piece(&mut self, out: &mut Events, index: usize, mut piece: Piece, usage: Option<Option<Usage>>) {
        if !std::mem::replace(&mut self.readers[index].1, true) {
            let usage = usage.as_ref().map(|_| None);
            let (delta, end) = (Message::opening(), None.into());
            let choice = ChatChunkChoice { index, delta, logprobs: None, end, token_ids: None };
            self.chunk(out, choice, piece.prompt.take(), usage);
        }
        let delta = Message::delta(self.readers[index].0.events(&mut piece));
        let (logprobs, token_ids) = (self.logprobs(&piece), self.token_ids(&piece));
        self.chunk(out, ChatChunkChoice { index, delta, logprobs, end: piece.finish.into(), token_ids }, None, usage);
    }

    fn usage(&mut self, out: &mut Events, usage: Usage, metrics: Option<Timings>) {
        let envelope = self.envelope::<ChatChunkChoice>("chat.completion.chunk", vec![], Some(Some(usage)));
        out.push(&Envelope { metrics, ..envelope });
    }
}

/// Waits for all choices. The first failure drops, and so cancels, the others.
async fn respond(mut generations: Vec<Generation>, mut format: Format) -> Result<Response, ApiError> {
    let readers = std::mem::take(&mut format.readers);
    let pairs = generations.iter_mut().zip(readers).enumerate();
    let choices = pairs.map(|(index, (generation, (reader, _)))| collect(index, generation, reader, &format));
    let (choices, prompts): (Vec<_>, Vec<_>) = try_join_all(choices).await?.into_iter().unzip();
    let usage = Usage::sum(generations.iter().map(Generation::counts), choices.len());
    let prompt = prompts.first().and_then(|prompt| format.prompt(prompt.as_ref()));
    let envelope = format.envelope("chat.completion", choices, Some(Some(usage)));
    let metrics = generations.first().and_then(Generation::timings);
    Ok(Json(Envelope { prompt, metrics, ..envelope }).into_response())
}

async fn collect(
    index: usize,
    generation: &mut Generation,
    mut reader: Reader,
    format: &Format,
) -> Result<(ChatChoice, Option<Prompt>), ApiError> {
    let (mut events, mut finish, mut prompt) = (Vec::new(), None, None);
    let (mut logprobs, mut token_ids): (Option<ChatLogprobs>, Option<Vec<u32>>) = (None, None);
    while let Some(piece) = generation.next().await {
        let mut piece = piece?;
        events.extend(reader.events(&mut piece));
        if let Some(more) = format.logprobs(&piece) {
            logprobs.get_or_insert_default().extend(more);
        }
        if let Some(more) = format.token_ids(&piece) {
            token_ids.get_or_insert_default().extend(more);
        }
        prompt = piece.prompt.or(prompt);
        finish = piece.finish;
    }
    let message = Message::whole(events);
    Ok((ChatChoice { index, message, logprobs, end: finish.into(), token_ids }, prompt))
}
