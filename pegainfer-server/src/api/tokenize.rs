//! `POST /tokenize` and `POST /detokenize`, in the shapes of vLLM.

use super::body::{self, RequestContext};
use super::chat_request::read_conversation;
use super::conversation::{Conversation, PromptOptions};
use super::policy::{FieldPolicy, with_ignored};
use super::schema::Body;
use super::schema::tokenize::{DetokenizeFields, TokenizeFields};
use super::schema::values::TokenId;
use super::state::{AppState, tokenizer_error};
use super::stop::check_vocabulary;
use crate::budget::Share;
use crate::error::ApiError;
use crate::text::{Caller, Tokenizer};
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde::{Serialize, Serializer};
use serde_json::json;
use std::sync::Arc;

/// Handles `POST /tokenize`: the token ids of a text, or of messages as the chat template renders them.
pub async fn tokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (context, bytes) = body::read(request, &state).await?;
    let shared = state.clone();
    let input = bytes.parse(&state, move |bytes| read(bytes, &shared.policy)).await?;
    let Input { model, text, add_special_tokens, with_strings, ignored } = input;
    state.model_named(model)?;
    let max_model_len = state.engine.limits().max_model_len;
    let respond = move |tokenizer: &Tokenizer, tokens: &[u32]| {
        let token_strs = with_strings.then_some(TokenStrings { tokenizer, tokens });
        json_bytes(&Tokenized { count: tokens.len(), max_model_len, tokens, token_strs })
    };
    let bytes = match text {
        Text::Prompt(text) => {
            let work = move |tokenizer: &Arc<Tokenizer>, _: &Caller<'_>| {
                let ids = tokenizer.encode(&text, add_special_tokens.unwrap_or(true));
                Ok::<_, ApiError>(respond(tokenizer, &ids.map_err(|error| tokenizer_error(&error, "prompt"))?))
            };
            state.work(context.size, work).await??
        }
        Text::Messages(conversation) => {
            // A chat template writes the special tokens itself.
            let add_special_tokens = add_special_tokens.unwrap_or(false);
            let options = PromptOptions { n: 0, add_special_tokens, is_bounded: false };
            let (_, ids) = conversation.encode(&state, &context, options).await?;
            state.work(context.size, move |tokenizer, _| respond(tokenizer, &ids)).await?
        }
    };
    Ok(with_ignored(send(bytes, context, &state).await?, ignored))
}

/// A request to tokenize.
struct Input {
    model: Option<String>,
    text: Text,
    add_special_tokens: Option<bool>,
    with_strings: bool,
    ignored: Option<HeaderValue>,
}

/// What to tokenize.
enum Text {
    Prompt(String),
    Messages(Box<Conversation>),
}

fn read(bytes: &[u8], policy: &FieldPolicy) -> Result<Input, ApiError> {
    let mut body = Body::parse(bytes)?;
    let TokenizeFields { model, prompt, add_special_tokens, return_token_strs } = body.read()?;
    let text = match prompt {
        Some(text) => Text::Prompt(text),
        None if body.has("messages") => Text::Messages(Box::new(read_conversation(&mut body)?)),
        None => return Err(ApiError::invalid("prompt", "send the text as prompt, or a conversation as messages")),
    };
    let ignored = policy.check(&body)?;
    Ok(Input { model, text, add_special_tokens, with_strings: return_token_strs.unwrap_or(false), ignored })
}

/// The response of `/tokenize`.
#[derive(Serialize)]
struct Tokenized<'a> {
    count: usize,
    max_model_len: usize,
    tokens: &'a [u32],
    token_strs: Option<TokenStrings<'a>>,
}

/// Tokens as tokenizer.json spells them.
struct TokenStrings<'a> {
    tokenizer: &'a Tokenizer,
    tokens: &'a [u32],
}

impl Serialize for TokenStrings<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.tokens.iter().map(|&id| self.tokenizer.vocabulary_text(id)))
    }
}

fn json_bytes(value: &impl Serialize) -> Vec<u8> {
    // Writing our own plain structs to memory cannot fail.
    serde_json::to_vec(value).unwrap_or_default()
}

/// A response that holds its share of the memory budget until the client has read it, or is gone.
async fn send(bytes: Vec<u8>, context: RequestContext, state: &AppState) -> Result<Response, ApiError> {
    drop(context);
    let share = state.budget.response(bytes.len()).await.map_err(|error| body::over_budget(&error, state))?;
    let body = Bytes::from_owner(Unsent { bytes, _share: share });
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// The bytes of a response, and their share of the memory budget.
struct Unsent {
    bytes: Vec<u8>,
    _share: Share,
}

impl AsRef<[u8]> for Unsent {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Handles `POST /detokenize`: the text of token ids, special tokens included.
pub async fn detokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (context, bytes) = body::read(request, &state).await?;
    let shared = state.clone();
    let parse = move |bytes: &[u8]| {
        let mut body = Body::parse(bytes)?;
        let fields: DetokenizeFields = body.read()?;
        Ok((fields, shared.policy.check(&body)?))
    };
    let (DetokenizeFields { model, tokens }, ignored) = bytes.parse(&state, parse).await?;
    state.model_named(model)?;
    let Some(tokens) = tokens else { return Err(ApiError::invalid("tokens", "tokens is missing")) };
    let vocab_size = state.engine.limits().vocab_size;
    let work = move |tokenizer: &Arc<Tokenizer>, _: &Caller<'_>| {
        let ids: Vec<u32> = tokens.into_iter().map(|TokenId(id)| id).collect();
        check_vocabulary(&ids, vocab_size, "tokens")?;
        Ok::<_, ApiError>(json_bytes(&json!({"prompt": tokenizer.decode_all(&ids)})))
    };
    let bytes = state.work(context.size, work).await??;
    Ok(with_ignored(send(bytes, context, &state).await?, ignored))
}
