//! `POST /v1/completions`.

use super::body;
use super::delta::Delta;
use super::fields::{Fields, describe, token_id};
use super::generation::Generation;
use super::logprobs::{CompletionLogprobs, TokenNames};
use super::params::{MAX_LOGPROBS, Params};
use super::policy::with_ignored;
use super::sse::{self, ChunkWriter, Events};
use super::state::{AppState, unix_time};
use super::structured::Structured;
use super::timings::Timings;
use super::wire::{CompletionChoice, Envelope, PromptFields, Usage};
use crate::error::ApiError;
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use futures_util::future::try_join_all;
use serde_json::Value;
use std::sync::Arc;

/// OpenAI's default of `max_tokens`.
const DEFAULT_MAX_TOKENS: usize = 16;
/// Maximum number of prompts of one request.
const MAX_PROMPTS: usize = 256;
/// Maximum number of choices of one request, over all prompts.
const MAX_CHOICES: usize = 256;

/// Value of the `prompt` field.
#[derive(Debug, PartialEq)]
enum PromptInput {
    Texts(Vec<String>),
    Ids(Vec<Vec<u32>>),
}

/// Handles `POST /v1/completions`.
pub async fn completions(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (headers, mut fields) = body::read(request, &state.options).await?;
    let mut params = Params::parse(&mut fields, &headers, &state).await?;
    params.echo = fields.bool("echo")?.unwrap_or(false);
    let prompt = parse_prompt(&mut fields, state.engine.limits().vocab_size)?;
    let logprobs = fields.integer("logprobs", 0..=MAX_LOGPROBS)?.map(|n| n as usize);
    let structured = Structured::parse(&mut fields)?;
    let ignored = state.policy.check_unknown_fields(&fields.rest())?;

    let prompts = match prompt {
        PromptInput::Ids(ids) => ids,
        PromptInput::Texts(texts) => state.encode(texts, params.add_special_tokens.unwrap_or(true), "prompt").await?,
    };
    let choices = prompts.len() * params.n;
    if choices > MAX_CHOICES {
        let message = format!("n asks for {choices} choices of all prompts, at most {MAX_CHOICES} are given");
        return Err(ApiError::invalid("n", message));
    }
    let grammar = Structured::compile(structured, &state).await?;
    let requests = prompts.into_iter();
    let requests = requests.map(|ids| params.requests(ids, DEFAULT_MAX_TOKENS, logprobs, grammar.clone(), &state));
    let requests = requests.collect::<Result<Vec<_>, _>>()?.concat();
    let generations = Generation::submit_all(&state, &params, requests, "completions", "prompt")?;
    let writer = CompletionWriter {
        id: format!("cmpl-{}", params.request_id),
        created: unix_time(),
        logprobs: logprobs.is_some(),
        params,
        state,
    };
    let response = match writer.params.stream {
        Some(options) => sse::respond(generations, writer.params.n, writer, options).await?,
        None => respond(generations, writer).await?,
    };
    Ok(with_ignored(response, ignored))
}

/// Parses `prompt`: a string, a list of token ids, or a list of either.
fn parse_prompt(fields: &mut Fields, vocab_size: usize) -> Result<PromptInput, ApiError> {
    let invalid = |message: &str| Err(ApiError::invalid("prompt", message));
    const EXPECTED: &str = "prompt must be a string, a list of strings, a list of token ids, or a list of such lists";
    let list = match fields.remove("prompt") {
        None => return invalid("prompt is missing"),
        Some(Value::String(text)) => return Ok(PromptInput::Texts(vec![text])),
        Some(Value::Array(list)) => list,
        Some(other) => return invalid(&format!("{EXPECTED}, got {}", describe(&other))),
    };
    let ids = |list: &[Value]| list.iter().map(|value| token_id(value, vocab_size, "prompt")).collect();
    match list.first() {
        None => return invalid("the prompt is empty: send at least one token"),
        Some(Value::Number(_)) => return Ok(PromptInput::Ids(vec![ids(&list)?])),
        Some(_) if list.len() > MAX_PROMPTS => {
            return invalid(&format!("prompt may hold at most {MAX_PROMPTS} prompts, got {}", list.len()));
        }
        Some(_) => {}
    }
    if list.iter().all(Value::is_string) {
        let texts = list.into_iter().filter_map(|value| value.as_str().map(str::to_string)).collect();
        return Ok(PromptInput::Texts(texts));
    }
    let Some(lists) = list.iter().map(Value::as_array).collect::<Option<Vec<_>>>() else { return invalid(EXPECTED) };
    Ok(PromptInput::Ids(lists.into_iter().map(|list| ids(list)).collect::<Result<_, _>>()?))
}

struct CompletionWriter {
    id: String,
    created: u64,
    logprobs: bool,
    params: Params,
    state: Arc<AppState>,
}

impl CompletionWriter {
    fn envelope(&self, choices: Vec<CompletionChoice>, usage: Option<Option<Usage>>) -> Envelope<'_, CompletionChoice> {
        let (object, model) = ("text_completion", self.params.model.as_str());
        Envelope { id: &self.id, object, created: self.created, model, choices, prompt: None, usage, metrics: None }
    }

    /// The part of the choice that one delta carries.
    fn choice(&self, index: usize, delta: Delta) -> CompletionChoice {
        let tokenizer = &*self.state.checkpoint.tokenizer;
        let names = TokenNames { tokenizer, by_id: self.params.ids_as_text };
        let echoed = delta.prompt.as_ref().filter(|_| self.params.echo);
        let text = echoed.map_or(String::new(), |prompt| tokenizer.decode_all(&prompt.ids)) + &delta.text;
        let logprobs = self.logprobs.then(|| {
            let mut logprobs = echoed.map(|prompt| CompletionLogprobs::of_prompt(prompt, &names)).unwrap_or_default();
            logprobs.extend(CompletionLogprobs::of(&delta, &names));
            logprobs
        });
        let prompt = delta.prompt.as_ref().and_then(|prompt| PromptFields::of(prompt, &self.params, tokenizer));
        let token_ids = self.params.token_ids.then(|| delta.token.iter().map(|token| token.id).collect());
        CompletionChoice { index, text, logprobs, prompt, finish: delta.finish.into(), token_ids }
    }
}

impl ChunkWriter for CompletionWriter {
    fn delta(&mut self, out: &mut Events, index: usize, delta: Delta, usage: Option<Option<Usage>>) {
        out.push(&self.envelope(vec![self.choice(index, delta)], usage));
    }

    fn usage(&mut self, out: &mut Events, usage: Usage, metrics: Option<Timings>) {
        out.push(&Envelope { metrics, ..self.envelope(vec![], Some(Some(usage))) });
    }
}

/// Waits for all choices. The first failure drops, and so cancels, the others.
async fn respond(mut generations: Vec<Generation>, writer: CompletionWriter) -> Result<Response, ApiError> {
    let collected = generations.iter_mut().enumerate().map(|(index, generation)| collect(index, generation, &writer));
    let choices = try_join_all(collected).await?;
    let usage = Usage::sum(generations.iter().map(Generation::counts), writer.params.n);
    let metrics = generations.first().and_then(Generation::timings);
    Ok(Json(Envelope { metrics, ..writer.envelope(choices, Some(Some(usage))) }).into_response())
}

async fn collect(
    index: usize,
    generation: &mut Generation,
    writer: &CompletionWriter,
) -> Result<CompletionChoice, ApiError> {
    let mut choice: Option<CompletionChoice> = None;
    while let Some(delta) = generation.next().await {
        let next = writer.choice(index, delta?);
        match &mut choice {
            Some(choice) => choice.extend(next),
            None => choice = Some(next),
        }
    }
    choice.ok_or_else(|| ApiError::internal("the engine ended a request without a token"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn prompt(value: Value) -> Result<PromptInput, ApiError> {
        parse_prompt(&mut Fields::new(json!({ "prompt": value }).as_object().unwrap().clone()), 10)
    }

    #[test]
    fn the_four_forms_of_a_prompt() {
        assert_eq!(prompt(json!("a")).unwrap(), PromptInput::Texts(vec!["a".into()]));
        assert_eq!(prompt(json!(["a", "b"])).unwrap(), PromptInput::Texts(vec!["a".into(), "b".into()]));
        assert_eq!(prompt(json!([1, 2])).unwrap(), PromptInput::Ids(vec![vec![1, 2]]));
        assert_eq!(prompt(json!([[1], [2, 3]])).unwrap(), PromptInput::Ids(vec![vec![1], vec![2, 3]]));
    }

    #[test]
    fn other_forms_are_refused() {
        for bad in [json!(null), json!(5), json!({}), json!([]), json!([1, "a"]), json!(["a", 1]), json!([[1], "a"])] {
            assert!(prompt(bad.clone()).is_err(), "{bad}");
        }
        for bad in [json!([-1]), json!([1.5]), json!([10]), json!([4294967297u64]), json!([[10]])] {
            assert!(prompt(bad.clone()).unwrap_err().body().contains("\"param\":\"prompt\""), "{bad}");
        }
    }
}
