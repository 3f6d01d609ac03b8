//! A submitted chat, independent of the API that it came through.

use super::body::RequestContext;
use super::chat_request::ChatRequest;
use super::delta::Delta;
use super::generation::Generation;
use super::images::{ImageFiles, Pictures};
use super::model_state::ModelState;
use super::params::Params;
use super::render::{EncodedPrompt, PromptOptions, Rendered};
use super::state::AppState;
use super::stop::check_vocabulary;
use super::structured::Structured;
use crate::error::ApiError;
use axum::http::HeaderValue;
use pegainfer_text::parser::{CallPrefix, Event, OutputParser};
use std::sync::Arc;

/// A chat whose choices have been submitted to the engine.
pub struct SubmittedChat {
    /// The model that has the request.
    pub model: ModelState,
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
        let chat = RenderedChat::new(request, context, state).await?;
        let RenderedChat { model, params, ids, images, rendered, logprobs, names_function, ignored } = chat;
        let Rendered { parsers, structured, thinking, .. } = rendered;
        let bytes = size_of_val(ids.as_slice()) + images.bytes();
        let structure = Structured::compile(structured, bytes, context, &model).await?;
        let grammar = model.model.text.grammars.for_engine(thinking, structure);
        let mut requests = params.requests(ids, usize::MAX, logprobs, grammar, &model)?;
        let pictures = Pictures::add(&mut requests, images, context, &model).await?;
        let mut generations = Generation::submit_all(&model, &params, requests, params.names.messages)?;
        generations.iter_mut().for_each(|generation| generation.keep_pictures(&pictures));
        let parsers = parsers
            .into_iter()
            .map(|parser| ChoiceParser { parser, reasoning_tokens: 0, early_call_tokens: 0 })
            .collect();
        Ok(Self { model, params, generations, parsers, logprobs: logprobs.is_some(), names_function, ignored })
    }
}

/// A chat whose prompt is rendered and tokenized.
pub struct RenderedChat {
    /// The model that has the request.
    pub model: ModelState,
    /// Parameters of the request.
    pub params: Params,
    /// Token ids of the prompt.
    pub ids: Vec<u32>,
    /// The files of its images.
    pub images: ImageFiles,
    /// Constraints and parsers of the outputs.
    pub rendered: Rendered,
    /// Number of most likely tokens to report at each position; `None` reports no log-probabilities.
    pub logprobs: Option<usize>,
    /// Value of the header `x-ignored-fields`.
    pub ignored: Option<HeaderValue>,
    names_function: bool,
}

impl RenderedChat {
    /// Checks a chat request, renders its prompt and tokenizes it.
    pub async fn new(request: ChatRequest, context: &RequestContext, state: &Arc<AppState>) -> Result<Self, ApiError> {
        let ChatRequest { mut generation, sampling, mut conversation, logprobs, ignored } = request;
        let model = ModelState::named(state, generation.wanted(), context, ignored.as_ref()).await?;
        let params = Params::new(generation, sampling, conversation.names, context, &model).await?;
        let ignored = model.policy.check_more(ignored, &conversation.fit(&model)?)?;
        if params.stream.is_some() {
            context.announce_stream(ignored.as_ref());
        }
        if let Some(ids) = &conversation.rendered {
            check_vocabulary(ids, model.model.engine.limits().vocab_size, "tokens")?;
        }
        let names_function = matches!(conversation.tools.prefix, CallPrefix::Function(_));
        let prompt = PromptOptions {
            n: params.n,
            add_special_tokens: params.add_special_tokens.unwrap_or(false),
            is_bounded: !params.is_truncated(),
        };
        if params.is_truncated() && !conversation.images.images.is_empty() {
            let message = "truncate_prompt_tokens cannot be combined with images: leave it out";
            return Err(ApiError::invalid("truncate_prompt_tokens", message).with_code("unsupported_parameter"));
        }
        let EncodedPrompt { rendered, ids, images } = conversation.encode(&model, context, prompt).await?;
        Ok(Self { model, params, ids, images, rendered, logprobs, ignored, names_function })
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
