//! `POST /v1/chat/completions`.

use super::answer::Message;
use super::errors::ApiError;
use super::fields::Fields;
use super::generation::{Generation, Piece};
use super::logprobs::ChatLogprobs;
use super::params::{MAX_LOGPROBS, Params};
use super::sse::{self, ChunkFormat, Events};
use super::state::{AppState, unix_time};
use super::tools::Tools;
use super::wire::{ChatChoice, ChatChunkChoice, Envelope, Usage};
use super::{body, messages, with_ignored};
use crate::http::request_id::random_u64;
use crate::text::parser::{Event, OutputParser, ParserOptions, ReasoningStart};
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
    let (headers, mut fields) = body::read(request, &state.options).await?;
    let params = Params::take(&mut fields, &headers, &state)?;
    let conversation = Conversation::take(&mut fields)?;
    let logprobs = take_logprobs(&mut fields)?;
    let ignored = state.policy.judge(&fields.rest())?;

    let (prompt, parsers) = conversation.render(&state, params.n)?;
    let mut ids = state.encode(vec![prompt], params.add_special_tokens.unwrap_or(false), "messages").await?;
    let requests = params.requests(ids.pop().unwrap_or_default(), usize::MAX, logprobs, &state)?;
    let generations = Generation::submit_all(&state, &params, requests, "chat", "messages")?;
    let format = Format {
        id: format!("chatcmpl-{}", params.request_id),
        created: unix_time(),
        model: params.model,
        logprobs: logprobs.is_some(),
        readers: parsers.into_iter().map(|parser| Reader { parser, opened: false }).collect(),
        state,
    };
    let response = match params.stream {
        Some(options) => sse::respond(generations, params.n, format, options).await?,
        None => respond(generations, format).await?,
    };
    Ok(with_ignored(response, ignored))
}

/// The part of a body that the chat template turns into a prompt.
pub struct Conversation {
    messages: Vec<Value>,
    tools: Tools,
    include_reasoning: bool,
    add_generation_prompt: bool,
    kwargs: Map<String, Value>,
}

impl Conversation {
    /// Takes it out of a body.
    pub fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        let kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
        if let Some(name) = RESERVED_KWARGS.iter().find(|&&name| kwargs.contains_key(name)) {
            let message = format!("chat_template_kwargs must not hold {name}");
            return Err(ApiError::invalid("chat_template_kwargs", message));
        }
        let tools = Tools::take(fields)?;
        let add_generation_prompt = fields.bool("add_generation_prompt")?.unwrap_or(true);
        if tools.forced() && !add_generation_prompt {
            let message = "tool_choice can force a call only with \"add_generation_prompt\": true";
            return Err(ApiError::invalid("tool_choice", message));
        }
        Ok(Self {
            messages: messages::take(fields)?,
            tools,
            include_reasoning: fields.bool("include_reasoning")?.unwrap_or(true),
            add_generation_prompt,
            kwargs,
        })
    }

    /// The prompt, and what reads each of its `n` answers.
    pub fn render(self, state: &AppState, n: usize) -> Result<(String, Vec<OutputParser>), ApiError> {
        let Some(template) = &state.checkpoint.template else {
            let message = "this model has no chat template: use /v1/completions";
            return Err(ApiError::invalid("messages", message));
        };
        let format = template.output_format();
        let tools = self.tools.format(format.tools)?;
        let shown = tools.map(|_| self.tools.definitions.as_slice());
        let mut prompt = template
            .render(&self.messages, shown, self.add_generation_prompt, &self.kwargs)
            .map_err(|e| ApiError::invalid("messages", e.to_string()))?;
        let mut reasoning = if format.reasoning { ReasoningStart::after(&prompt) } else { ReasoningStart::Never };
        if let Some(tools) = tools.filter(|_| self.tools.forced()) {
            // The call comes at once: there is no reasoning before it.
            prompt = prompt + reasoning.close(tools) + &self.tools.prefix.text(tools);
            reasoning = ReasoningStart::Never;
        }
        let parser = |id_seed| {
            OutputParser::new(ParserOptions {
                reasoning,
                include_reasoning: self.include_reasoning,
                tools,
                prefix: self.tools.prefix.clone(),
                definitions: self.tools.definitions.clone(),
                max_calls: self.tools.max_calls,
                id_seed,
            })
        };
        let parsers = (0..n).map(|_| random_u64().map(parser)).collect::<Result<_, _>>()?;
        Ok((prompt, parsers))
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

/// Where one choice is.
struct Reader {
    parser: OutputParser,
    /// The chunk with the role was sent.
    opened: bool,
}

impl Reader {
    /// What a piece of text turns out to be. The last one also ends the parser, and tells calls from an ordinary stop.
    fn events(&mut self, piece: &mut Piece) -> Vec<Event> {
        let mut events = self.parser.push(&piece.text);
        if let Some(finish) = &mut piece.finish {
            events.extend(self.parser.finish());
            if finish.reason == "stop" && self.parser.has_calls() {
                finish.reason = "tool_calls";
            }
        }
        events
    }
}

struct Format {
    id: String,
    created: u64,
    model: String,
    logprobs: bool,
    /// One for each choice.
    readers: Vec<Reader>,
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
    fn piece(&mut self, out: &mut Events, index: usize, mut piece: Piece, usage: Option<Option<Usage>>) {
        if !std::mem::replace(&mut self.readers[index].opened, true) {
            let usage = usage.as_ref().map(|_| None);
            let choice = ChatChunkChoice { index, delta: Message::opening(), logprobs: None, end: None.into() };
            self.chunk(out, vec![choice], usage);
        }
        let delta = Message::delta(self.readers[index].events(&mut piece));
        let logprobs = self.logprobs(&piece);
        self.chunk(out, vec![ChatChunkChoice { index, delta, logprobs, end: piece.finish.into() }], usage);
    }

    fn usage(&mut self, out: &mut Events, usage: Usage) {
        self.chunk(out, vec![], Some(Some(usage)));
    }
}

/// Waits for all choices. The first failure drops, and so cancels, the others.
async fn respond(mut generations: Vec<Generation>, mut format: Format) -> Result<Response, ApiError> {
    let readers = std::mem::take(&mut format.readers);
    let pairs = generations.iter_mut().zip(readers).enumerate();
    let choices = pairs.map(|(index, (generation, reader))| collect(index, generation, reader, &format));
    let choices = try_join_all(choices).await?;
    let usage = Usage::sum(generations.iter().map(Generation::counts), choices.len());
    Ok(Json(format.envelope("chat.completion", choices, Some(Some(usage)))).into_response())
}

async fn collect(
    index: usize,
    generation: &mut Generation,
    mut reader: Reader,
    format: &Format,
) -> Result<ChatChoice, ApiError> {
    let (mut events, mut finish) = (Vec::new(), None);
    let mut logprobs: Option<ChatLogprobs> = None;
    while let Some(piece) = generation.next().await {
        let mut piece = piece?;
        events.extend(reader.events(&mut piece));
        if let Some(more) = format.logprobs(&piece) {
            logprobs.get_or_insert_default().extend(more);
        }
        finish = piece.finish;
    }
    Ok(ChatChoice { index, message: Message::whole(events), logprobs, end: finish.into() })
}
