//! `POST /tokenize` and `POST /detokenize`, in the shapes of vLLM.

use super::body;
use super::chat_request::read_conversation;
use super::conversation::Conversation;
use super::large_response::{self, json_bytes};
use super::model_state::ModelState;
use super::policy::{FieldPolicy, with_ignored};
use super::render::{EncodedPrompt, PromptOptions};
use super::schema::Body;
use super::schema::numbers::TokenId;
use super::schema::tokenize::{DetokenizeFields, TokenizeFields};
use super::state::{AppState, over_budget};
use super::stop::check_vocabulary;
use crate::error::ApiError;
use crate::text_service::CancelCheck;
use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::response::Response;
use pegainfer_text::Tokenizer;
use schemars::JsonSchema;
use serde::{Serialize, Serializer};
use std::sync::Arc;

/// Maximum number of bytes of a token id in a response.
const TOKEN_BYTES: usize = 8;
/// Maximum average number of bytes of a token's string: bytes of text may be escaped.
const STRING_BYTES: usize = 8;

/// Handles `POST /tokenize`: the token ids of a text, or of messages as the chat template renders them.
pub async fn tokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (context, bytes) = body::read(request, &state).await?;
    let shared = state.clone();
    let input = bytes.parse(&state, move |bytes| read(bytes, &shared.policy)).await?;
    let Input { model, text, add_special_tokens, with_strings, mut ignored } = input;
    let state = ModelState::named(&state, model.into(), &context, None).await?;
    let max_model_len = state.model.engine.limits().max_model_len;
    let respond = move |tokenizer: &Tokenizer, tokens: &[u32]| {
        let token_strs = with_strings.then_some(TokenStrings { tokenizer, tokens });
        json_bytes(&Tokenized { count: tokens.len(), max_model_len, tokens, token_strs })
    };
    let token_bytes = if with_strings { TOKEN_BYTES + STRING_BYTES } else { TOKEN_BYTES };
    let (json, share) = match text {
        Text::Prompt(text) => {
            context.hold.shrink(text.len());
            let share = large_response::share(&state, &context.hold, context.tenant, text.len() * token_bytes).await?;
            let work = move |tokenizer: &Arc<Tokenizer>, _: &CancelCheck<'_>| {
                let ids = tokenizer.encode(&text, add_special_tokens.unwrap_or(true));
                Ok::<_, ApiError>(respond(
                    tokenizer,
                    &ids.map_err(|error| ApiError::invalid("prompt", error.to_string()))?,
                ))
            };
            (state.tokenize(&context.hold, work).await??, share)
        }
        Text::Messages(mut conversation) => {
            ignored = state.policy.check_more(ignored, &conversation.fit(&state)?)?;
            // A chat template writes the special tokens itself.
            let add_special_tokens = add_special_tokens.unwrap_or(false);
            let options = PromptOptions { n: 0, add_special_tokens, is_bounded: false };
            let EncodedPrompt { ids, .. } = conversation.encode(&state, &context, options).await?;
            context.hold.shrink(size_of_val(ids.as_slice()));
            let share = large_response::share(&state, &context.hold, context.tenant, ids.len() * token_bytes).await?;
            (state.tokenize(&context.hold, move |tokenizer, _| respond(tokenizer, &ids)).await?, share)
        }
    };
    // Free the body, which is no longer needed.
    drop(context);
    Ok(with_ignored(large_response::json_response(json, share), ignored))
}

/// A request to tokenize.
struct Input {
    model: Option<String>,
    text: Text,
    add_special_tokens: Option<bool>,
    with_strings: bool,
    ignored: Option<HeaderValue>,
}

/// The text to tokenize.
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
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Tokenized")]
pub struct Tokenized<'a> {
    /// Number of tokens.
    count: usize,
    /// Length of the model's context.
    max_model_len: usize,
    /// Token ids.
    tokens: &'a [u32],
    /// The tokens as tokenizer.json spells them, if the client asked for them.
    #[schemars(with = "Option<Vec<Option<String>>>")]
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

/// The response of `/detokenize`.
#[derive(Serialize, JsonSchema)]
pub struct Detokenized {
    /// The text.
    prompt: String,
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
    let state = ModelState::named(&state, model.into(), &context, None).await?;
    let Some(tokens) = tokens else { return Err(ApiError::invalid("tokens", "tokens is missing")) };
    let vocab_size = state.model.engine.limits().vocab_size;
    let ids: Vec<u32> = tokens.into_iter().map(|TokenId(id)| id).collect();
    check_vocabulary(&ids, vocab_size, "tokens")?;
    // The client chooses the ids, so the length of their texts is computed before any is built.
    let measure = move |tokenizer: &Arc<Tokenizer>, _: &CancelCheck<'_>| (tokenizer.max_text_bytes(&ids), ids);
    let (max_bytes, ids) = state.tokenize(&context.hold, measure).await?;
    large_response::check_size("the text of these tokens", max_bytes, &state)?;
    context.hold.shrink(size_of_val(ids.as_slice()));
    let (tenant, shared) = (context.tenant, state.clone());
    // The text and its JSON are in memory at the same time.
    let mut share = large_response::share(&state, &context.hold, tenant, 2 * max_bytes).await?;
    let work = move |tokenizer: &Arc<Tokenizer>, _: &CancelCheck<'_>| {
        let text = tokenizer.decode_all(&ids);
        // An escape may take six bytes for one.
        let beyond = (text.len() + json_string_bytes(&text)).saturating_sub(2 * max_bytes);
        shared.output.grow(&mut share, tenant, beyond).map_err(|error| over_budget(&error, &shared))?;
        Ok::<_, ApiError>((json_bytes(&Detokenized { prompt: text }), share))
    };
    let (json, share) = state.tokenize(&context.hold, work).await??;
    drop(context);
    Ok(with_ignored(large_response::json_response(json, share), ignored))
}

fn json_string_bytes(text: &str) -> usize {
    let escaped = |byte: u8| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 8 | 12 => 2,
        0..0x20 => 6,
        _ => 1,
    };
    2 + text.bytes().map(escaped).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_json_string_has_the_measured_size() {
        for text in ["", "a\u{1}b\n\t\r\u{8}\u{c}\"\\/é😀\u{7f}\u{1f}", "plain"] {
            assert_eq!(json_string_bytes(text), serde_json::to_string(text).unwrap().len(), "{text:?}");
        }
    }
}
