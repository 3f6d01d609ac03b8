//! A chat that is under way, the same whichever API it came through.

use super::conversation::{Conversation, Rendered};
use super::errors::ApiError;
use super::fields::Fields;
use super::generation::Generation;
use super::params::{MAX_LOGPROBS, Params};
use super::piece::Piece;
use super::state::AppState;
use super::structured::Structured;
use crate::text::parser::{Event, OutputParser};
use axum::http::{HeaderMap, HeaderValue};
use std::sync::Arc;

/// A submitted chat.
pub struct Exchange {
    /// How it goes on.
    pub params: Params,
    /// One for each choice.
    pub generations: Vec<Generation>,
    /// One for each choice.
    pub readers: Vec<Reader>,
    /// Log-probabilities were asked for.
    pub logprobs: bool,
    /// Fields that were not understood, for `with_ignored`.
    pub ignored: Option<HeaderValue>,
}

impl Exchange {
    /// Parses the body of a chat request and submits it; `endpoint` is its name in the metrics.
    pub async fn start(
        mut fields: Fields,
        headers: &HeaderMap,
        state: &Arc<AppState>,
        endpoint: &'static str,
    ) -> Result<Self, ApiError> {
        let params = Params::take(&mut fields, headers, state).await?;
        let conversation = Conversation::take(&mut fields)?;
        let logprobs = take_logprobs(&mut fields)?;
        let ignored = state.policy.judge(&fields.rest())?;

        let Rendered { prompt, parsers, structured, thinking } = conversation.render(state, params.n)?;
        let mut ids = state.encode(vec![prompt], params.add_special_tokens.unwrap_or(false), "messages").await?;
        let answer = Structured::compile(structured, state).await?;
        let reasoned = thinking.and_then(|thinking| state.grammars.after_reasoning(thinking, answer.clone()));
        let grammar = reasoned.or(answer);
        let requests = params.requests(ids.pop().unwrap_or_default(), usize::MAX, logprobs, grammar, state)?;
        let generations = Generation::submit_all(state, &params, requests, endpoint, "messages")?;
        let readers = parsers.into_iter().map(|parser| Reader { parser, reasoning_tokens: 0 }).collect();
        Ok(Self { params, generations, readers, logprobs: logprobs.is_some(), ignored })
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

/// What tells one choice's text apart.
pub struct Reader {
    parser: OutputParser,
    /// Tokens so far that are reasoning.
    pub reasoning_tokens: usize,
}

impl Reader {
    /// What a piece of text turns out to be. The last one also ends the parser, and tells calls from an ordinary stop.
    pub fn events(&mut self, piece: &mut Piece) -> Vec<Event> {
        let mut events = self.parser.push(&piece.text);
        self.reasoning_tokens += usize::from(self.parser.in_reasoning());
        if let Some(finish) = &mut piece.finish {
            events.extend(self.parser.finish());
            if finish.reason == "stop" && self.parser.has_calls() {
                finish.reason = "tool_calls";
            }
        }
        events
    }
}
