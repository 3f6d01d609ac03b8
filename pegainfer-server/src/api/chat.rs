//! `POST /v1/chat/completions`.

use super::assistant_message::AssistantMessage;
use super::body;
use super::chat_request::ChatRequest;
use super::delta::{ChoiceOutput, Counts, Delta, Finish, PromptInfo};
use super::generation::Generation;
use super::large_response::{GrowingResponse, json_bytes};
use super::logprobs::{ChatLogprobs, TokenNames};
use super::model_state::ModelState;
use super::params::Params;
use super::policy::with_ignored;
use super::schema::Body;
use super::sse::{self, ChunkWriter, Events};
use super::state::{AppState, unix_time};
use super::submitted_chat::{ChoiceParser, SubmittedChat};
use super::timings::Timings;
use super::wire::{ChatChoice, ChatChunkChoice, Chunk, ChunkUsage, Envelope, FinishFields, PromptFields, Usage};
use crate::error::ApiError;
use axum::extract::{Request, State};
use axum::response::Response;
use futures_util::future::try_join_all;
use pegainfer_core::engine::TokenOut;
use pegainfer_text::parser::Event;
use std::sync::Arc;

/// Handles `POST /v1/chat/completions`.
pub async fn chat(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (context, bytes) = body::read(request, &state).await?;
    let shared = state.clone();
    let request = bytes.parse(&state, move |bytes| ChatRequest::read(Body::parse(bytes)?, &shared.policy)).await?;
    let SubmittedChat { model, params, generations, parsers, logprobs, names_function, ignored } =
        SubmittedChat::start(request, &context, &state).await?;
    let submitted = context.submitted();
    let writer = ChatWriter {
        id: format!("chatcmpl-{}", params.request_id),
        created: unix_time(),
        logprobs,
        names_function,
        parsers: parsers.into_iter().map(|parser| (parser, false)).collect(),
        params,
        state: model,
    };
    let response = match writer.params.stream {
        Some(_) => {
            let n = writer.params.n;
            sse::respond(state, submitted, generations, n, writer).await?
        }
        None => respond(generations, writer).await?,
    };
    Ok(with_ignored(response, ignored))
}

struct ChatWriter {
    id: String,
    created: u64,
    logprobs: bool,
    /// True if `tool_choice` names the called function. As in OpenAI's API, the finish reason is then `stop`.
    names_function: bool,
    /// For each choice: its parser, and whether the chunk with the role was sent.
    parsers: Vec<(ChoiceParser, bool)>,
    params: Params,
    state: ModelState,
}

impl ChatWriter {
    fn chunk(
        &self,
        out: &mut Events,
        choices: Vec<ChatChunkChoice>,
        prompt: Option<PromptFields>,
        usage: ChunkUsage,
        metrics: Option<Timings>,
    ) {
        let (object, model) = ("chat.completion.chunk", self.params.model.as_str());
        out.push(&Chunk { id: &self.id, object, created: self.created, model, choices, prompt, usage, metrics });
    }

    fn prompt(&self, prompt: Option<&PromptInfo>) -> Option<PromptFields> {
        PromptFields::new(prompt?, &self.params, &self.state.model.text.checkpoint.tokenizer)
    }

    fn logprobs<'a>(&self, tokens: impl IntoIterator<Item = &'a TokenOut>) -> Option<ChatLogprobs> {
        let names =
            TokenNames { tokenizer: &self.state.model.text.checkpoint.tokenizer, by_id: self.params.ids_as_text };
        self.logprobs.then(|| ChatLogprobs::new(tokens, &names))
    }

    /// Finish fields of a choice.
    fn finish_fields(&self, finish: Option<Finish>) -> FinishFields {
        let named = |finish: Finish| match finish.reason {
            "tool_calls" if self.names_function => Finish { reason: "stop", ..finish },
            _ => finish,
        };
        finish.map(named).into()
    }

    fn token_ids<'a>(&self, tokens: impl IntoIterator<Item = &'a TokenOut>) -> Option<Vec<u32>> {
        self.params.token_ids.then(|| tokens.into_iter().map(|token| token.id).collect())
    }

    /// A complete choice.
    fn choice(&self, index: usize, (events, output): (Vec<Event>, ChoiceOutput)) -> (ChatChoice, Option<PromptInfo>) {
        let ChoiceOutput { tokens, prompt, finish, .. } = output;
        let tokens = || tokens.iter().map(|(token, _)| token);
        let (logprobs, token_ids) = (self.logprobs(tokens()), self.token_ids(tokens()));
        let (message, finish) = (AssistantMessage::whole(events), self.finish_fields(finish));
        (ChatChoice { index, message, logprobs, finish, token_ids }, prompt)
    }
}

impl ChunkWriter for ChatWriter {
    fn delta(&mut self, out: &mut Events, index: usize, mut delta: Delta, counts: Counts) {
        let options = self.params.stream.unwrap_or_default();
        if !std::mem::replace(&mut self.parsers[index].1, true) {
            let (opening, finish) = (AssistantMessage::opening(), None.into());
            let choice = ChatChunkChoice { index, delta: opening, logprobs: None, finish, token_ids: None };
            let prompt = self.prompt(delta.prompt.take().as_ref());
            self.chunk(out, vec![choice], prompt, ChunkUsage::none(options), None);
        }
        let message = AssistantMessage::delta(self.parsers[index].0.parse(&mut delta));
        let (logprobs, token_ids) = (self.logprobs(&delta.token), self.token_ids(&delta.token));
        let reasoning_tokens = self.parsers[index].0.reasoning_tokens;
        let usage = ChunkUsage::running_total(options, || Usage::sum([counts], 1).with_reasoning(reasoning_tokens));
        let finish = self.finish_fields(delta.finish);
        let choice = ChatChunkChoice { index, delta: message, logprobs, finish, token_ids };
        self.chunk(out, vec![choice], None, usage, None);
    }

    /// Writes one more chunk, with only the counts, if the client asked for them.
    fn finish(&mut self, out: &mut Events, usage: Usage, metrics: Option<Timings>) {
        if self.params.stream.is_some_and(|options| options.include_usage) || metrics.is_some() {
            let reasoning_tokens = self.parsers.iter().map(|(parser, _)| parser.reasoning_tokens).sum();
            let usage = ChunkUsage::Counts(usage.with_reasoning(reasoning_tokens));
            self.chunk(out, vec![], None, usage, metrics);
        }
    }
}

/// Waits for all choices. The first failure drops the others, which cancels them.
async fn respond(mut generations: Vec<Generation>, mut writer: ChatWriter) -> Result<Response, ApiError> {
    let growing = GrowingResponse::new(writer.params.tenant);
    let mut parsers = std::mem::take(&mut writer.parsers);
    let pairs = generations.iter_mut().zip(&mut parsers);
    let collected = pairs.map(|(generation, (parser, _))| collect(generation, parser, &writer, &growing));
    let outputs = try_join_all(collected).await?;
    let reasoning_tokens = parsers.iter().map(|(parser, _)| parser.reasoning_tokens).sum();
    let usage = Usage::sum(generations.iter().map(Generation::counts), outputs.len()).with_reasoning(reasoning_tokens);
    let metrics = generations.first().and_then(Generation::timings);
    let state = writer.state.clone();
    let write = move || {
        let choices = outputs.into_iter().enumerate().map(|(index, output)| writer.choice(index, output));
        let (choices, prompts): (Vec<_>, Vec<_>) = choices.unzip();
        let prompt = prompts.first().and_then(|prompt| writer.prompt(prompt.as_ref()));
        let (id, object, created) = (writer.id.as_str(), "chat.completion", writer.created);
        let model = writer.params.model.as_str();
        json_bytes(&Envelope { id, object, created, model, choices, prompt, usage, metrics })
    };
    growing.respond(&state, write).await
}

/// Parsed text of a choice, and the rest of its output.
async fn collect(
    generation: &mut Generation,
    parser: &mut ChoiceParser,
    writer: &ChatWriter,
    growing: &GrowingResponse,
) -> Result<(Vec<Event>, ChoiceOutput), ApiError> {
    let (mut events, mut output) = (Vec::new(), ChoiceOutput::default());
    while let Some(delta) = generation.next().await {
        let mut delta = delta?;
        growing.add(&delta, &writer.state)?;
        events.extend(parser.parse(&mut delta));
        output.push(delta, writer.logprobs || writer.params.token_ids);
    }
    Ok((events, output))
}
