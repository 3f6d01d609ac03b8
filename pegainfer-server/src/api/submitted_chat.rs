//! A submitted chat, independent of the API that it came through.

use super::body::RequestContext;
use super::chat_request::ChatRequest;
use super::delta::Delta;
use super::generation::Generation;
use super::params::Params;
use super::render::{PromptOptions, Rendered};
use super::state::AppState;
use super::structured::Structured;
use crate::error::ApiError;
use axum::http::HeaderValue;
use pegainfer_text::parser::{CallPrefix, Event, OutputParser};
use std::sync::Arc;

/// A chat whose choices have been submitted to the engine.
pub struct SubmittedChat {
    /// Parameters of the request.
    pub params: Params,
    /// Generation of each choice.
    pub generations: Vec<Generation>,
    /// Output parser of each choice.
    pub parsers: Vec<ChoiceParser>,
    /// True if the client asked for log-probabilities.
    pub logprobs: bool,
    /// True if `tool_choice` names the called function.
    pub names_function: bool,
    /// Value of the header `x-ignored-fields`, for `with_ignored`.
    pub ignored: Option<HeaderValue>,
}

impl SubmittedChat {
    /// Renders a chat request and submits it.
    pub async fn start(
        request: ChatRequest,
        context: &RequestContext,
        state: &Arc<AppState>,
    ) -> Result<Self, ApiError> {
        let ChatRequest { generation, sampling, mut conversation, logprobs, ignored } = request;
        let params = Params::new(generation, sampling, conversation.names, context, state).await?;
        let ignored = state.policy.check_more(ignored, conversation.set_effort(state)?.as_slice())?;
        if params.stream.is_some() {
            context.announce_stream(ignored.as_ref());
        }
        let (names_function, messages) =
            (matches!(conversation.tools.prefix, CallPrefix::Function(_)), params.names.messages);
        let prompt = PromptOptions {
            n: params.n,
            add_special_tokens: params.add_special_tokens.unwrap_or(false),
            is_bounded: !params.is_truncated(),
        };
        let (Rendered { parsers, structured, thinking, .. }, ids) = conversation.encode(state, context, prompt).await?;
        let structure = Structured::compile(structured, size_of_val(ids.as_slice()), context, state).await?;
        let grammar = state.grammars.for_engine(thinking, structure);
        let requests = params.requests(ids, usize::MAX, logprobs, grammar, state)?;
        let generations = Generation::submit_all(state, &params, requests, messages)?;
        let parsers = parsers
            .into_iter()
            .map(|parser| ChoiceParser { parser, reasoning_tokens: 0, early_call_tokens: 0 })
            .collect();
        Ok(Self { params, generations, parsers, logprobs: logprobs.is_some(), names_function, ignored })
    }
}

/// Splits the text of one choice into reasoning, content and tool calls.
pub struct ChoiceParser {
    parser: OutputParser,
    /// Number of reasoning tokens so far.
    pub reasoning_tokens: usize,
    /// Number of tokens of a call inside the reasoning. They count as reasoning if the call is a draft.
    early_call_tokens: usize,
}

impl ChoiceParser {
    /// Parses one delta into events. The last delta also ends the parser, and turns `stop` into `tool_calls` after a
    /// call.
    pub fn parse(&mut self, delta: &mut Delta) -> Vec<Event> {
        let mut events = self.parser.push(&delta.text);
        if self.parser.in_early_call() {
            self.early_call_tokens += 1;
        } else {
            let drafted = std::mem::take(&mut self.early_call_tokens);
            self.reasoning_tokens += drafted + usize::from(self.parser.in_reasoning());
        }
        if let Some(finish) = &mut delta.finish {
            events.extend(self.parser.finish());
            if !self.parser.in_early_call() {
                self.reasoning_tokens += std::mem::take(&mut self.early_call_tokens);
            }
            if finish.reason == "stop" && self.parser.has_calls() {
                finish.reason = "tool_calls";
            }
        }
        events
    }
}
