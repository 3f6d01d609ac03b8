//! `POST /v1/completions`.

use super::body;
use super::completion::{Completion, CompletionRequest};
use super::delta::{ChoiceOutput, Counts, Delta};
use super::generation::Generation;
use super::large_response::{GrowingResponse, json_bytes};
use super::logprobs::{CompletionLogprobs, TokenNames};
use super::model_state::ModelState;
use super::params::Params;
use super::policy::with_ignored;
use super::sse::{self, ChunkWriter, Events};
use super::state::{AppState, unix_time};
use super::timings::Timings;
use super::wire::{Chunk, ChunkUsage, CompletionChoice, Envelope, PromptFields, Usage};
use crate::error::ApiError;
use axum::extract::{Request, State};
use axum::response::Response;
use futures_util::future::try_join_all;
use std::sync::Arc;

/// Object type of responses and chunks.
const OBJECT: &str = "text_completion";

/// Handles `POST /v1/completions`.
pub async fn completions(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (context, bytes) = body::read(request, &state).await?;
    let shared = state.clone();
    let request = bytes.parse(&state, move |bytes| CompletionRequest::read(bytes, &shared.policy)).await?;
    let mut completion = Completion::new(request, &context, &state).await?;
    let generations = completion.submit(&context).await?;
    let submitted = context.submitted();
    let Completion { model, params, logprobs, ignored, .. } = completion;
    let writer = CompletionWriter {
        id: format!("cmpl-{}", params.request_id),
        created: unix_time(),
        logprobs: logprobs.is_some(),
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

struct CompletionWriter {
    id: String,
    created: u64,
    logprobs: bool,
    params: Params,
    state: ModelState,
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
        let tokenizer = &*self.state.model.text.checkpoint.tokenizer;
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
    let (keeps_tokens, state) = (writer.keeps_tokens(), writer.state.clone());
    let collected = generations.iter_mut().map(|generation| generation.collect(keeps_tokens, &growing, &state));
    let outputs = try_join_all(collected).await?;
    let usage = Usage::sum(generations.iter().map(Generation::counts), writer.params.n);
    let metrics = generations.first().and_then(Generation::timings);
    let write = move || {
        let choices = outputs.into_iter().enumerate().map(|(index, output)| writer.choice(index, output)).collect();
        let (id, created, model) = (writer.id.as_str(), writer.created, writer.params.model.as_str());
        json_bytes(&Envelope { id, object: OBJECT, created, model, choices, prompt: None, usage, metrics })
    };
    growing.respond(&state, write).await
}
