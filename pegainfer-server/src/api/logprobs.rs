//! Log-probabilities in the two shapes of OpenAI.

use super::delta::PromptInfo;
use pegainfer_core::engine::{TokenLogprobs, TokenOut};
use pegainfer_text::{Detokenizer, Tokenizer};
use schemars::JsonSchema;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;

/// JSON has no infinity. A token that cannot be drawn gets vLLM's value.
pub const MIN_LOGPROB: f32 = -9999.0;

/// Four parallel lists, one entry per token.
#[derive(Serialize, JsonSchema, Default, Debug)]
pub struct CompletionLogprobs {
    /// Number of characters before each token.
    text_offset: Vec<usize>,
    /// `None` for the first token of an echoed prompt, which follows nothing.
    token_logprobs: Vec<Option<f32>>,
    /// Texts of the tokens.
    tokens: Vec<String>,
    /// The most likely tokens of each position, by text.
    #[schemars(with = "Vec<Option<BTreeMap<String, f32>>>")]
    top_logprobs: Vec<Option<TokenMap>>,
}

/// Tokens by text, most likely first.
#[derive(Debug)]
struct TokenMap(Vec<(String, f32)>);

impl Serialize for TokenMap {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}

/// How log-probabilities name tokens.
pub struct TokenNames<'a> {
    /// Gives the text of a token.
    pub tokenizer: &'a Tokenizer,
    /// Name tokens by id, as `token_id:5`.
    pub by_id: bool,
}

impl TokenNames<'_> {
    fn name(&self, id: u32) -> String {
        if self.by_id { format!("token_id:{id}") } else { self.tokenizer.token_text(id) }
    }
}

impl CompletionLogprobs {
    /// Log-probabilities of an echoed prompt, if there is one, and of the tokens after it. Each token comes with the
    /// number of characters before it.
    pub fn new(prompt: Option<&PromptInfo>, tokens: &[(TokenOut, usize)], names: &TokenNames) -> Self {
        let mut lists = prompt.map(|prompt| Self::of_prompt(prompt, names)).unwrap_or_default();
        for (token, offset) in tokens {
            if let Some(logprobs) = &token.logprobs {
                lists.push(token.id, *offset, Some(logprobs), names);
            }
        }
        lists
    }

    fn of_prompt(prompt: &PromptInfo, names: &TokenNames) -> Self {
        let (mut lists, mut text, mut chars) = (Self::default(), Detokenizer::new(true), 0);
        let logprobs =
            std::iter::once(None).chain(prompt.logprobs.iter().flat_map(|logprobs| logprobs.iter()).map(Some));
        for (id, token) in prompt.ids.iter().zip(logprobs) {
            lists.push(*id, chars, token, names);
            let mut decoded = String::new();
            text.push(names.tokenizer, *id, &mut decoded);
            chars += decoded.chars().count();
        }
        lists
    }

    fn push(&mut self, id: u32, offset: usize, token: Option<&TokenLogprobs>, names: &TokenNames) {
        let text = names.name(id);
        self.text_offset.push(offset);
        self.token_logprobs.push(token.map(|token| token.logprob.max(MIN_LOGPROB)));
        self.top_logprobs.push(token.map(|token| {
            // Different tokens may have the same text; the more likely one is kept. The token itself is always listed.
            let mut top: Vec<(String, f32)> = Vec::with_capacity(token.top.len() + 1);
            let listed = token.top.iter().map(|&(id, logprob)| (names.name(id), logprob));
            for (text, logprob) in listed.chain([(text.clone(), token.logprob)]) {
                if !top.iter().any(|(other, _)| *other == text) {
                    top.push((text, logprob.max(MIN_LOGPROB)));
                }
            }
            TokenMap(top)
        }));
        self.tokens.push(text);
    }
}

/// One list, one entry per token.
#[derive(Serialize, JsonSchema, Default, Debug)]
pub struct ChatLogprobs {
    /// The tokens.
    content: Vec<ChatToken>,
}

/// A token and its log-probability.
#[derive(Serialize, JsonSchema, Debug)]
struct ChatToken {
    /// Text of the token.
    token: String,
    /// Its log-probability.
    logprob: f32,
    /// Its bytes, which may be a part of a character.
    bytes: Vec<u8>,
    /// The most likely tokens of this position.
    top_logprobs: Vec<TopToken>,
}

/// A token that could have been drawn.
#[derive(Serialize, JsonSchema, Debug)]
struct TopToken {
    /// Text of the token.
    token: String,
    /// Its log-probability.
    logprob: f32,
    /// Its bytes, which may be a part of a character.
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    /// Log-probabilities of these tokens.
    pub fn new<'a>(tokens: impl IntoIterator<Item = &'a TokenOut>, names: &TokenNames) -> Self {
        let entry = |id: u32, logprob: f32| {
            let bytes = names.tokenizer.token_bytes(id);
            TopToken { token: names.name(id), logprob: logprob.max(MIN_LOGPROB), bytes }
        };
        let tokens = tokens.into_iter().filter_map(|token| Some((token.id, token.logprobs.as_ref()?)));
        let content = tokens.map(|(id, logprobs)| {
            let TopToken { token, logprob, bytes } = entry(id, logprobs.logprob);
            let top_logprobs = logprobs.top.iter().map(|&(id, logprob)| entry(id, logprob)).collect();
            ChatToken { token, logprob, bytes, top_logprobs }
        });
        Self { content: content.collect() }
    }
}

/// vLLM's `prompt_logprobs`: null for the first token, then for each token a map by token id, its own id first.
#[derive(Serialize, JsonSchema, Debug)]
pub struct PromptLogprobs(#[schemars(with = "Vec<Option<BTreeMap<String, PromptToken>>>")] Vec<Option<Position>>);

#[derive(Debug)]
struct Position(Vec<(u32, PromptToken)>);

/// A token of the prompt, or one that was more likely there.
#[derive(Serialize, JsonSchema, Debug)]
struct PromptToken {
    /// Its log-probability.
    logprob: f32,
    /// Its rank among all tokens, from 1.
    rank: u32,
    /// Its text.
    decoded_token: String,
}

impl Serialize for Position {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(id, token)| (id, token)))
    }
}

impl PromptLogprobs {
    /// The log-probabilities of `ids[1..]`.
    pub fn new(ids: &[u32], logprobs: &[TokenLogprobs], tokenizer: &Tokenizer) -> Self {
        let position = |(id, listed): (&u32, &TokenLogprobs)| {
            let token = |id: u32, logprob: f32, rank: u32| {
                (id, PromptToken { logprob: logprob.max(MIN_LOGPROB), rank, decoded_token: tokenizer.token_text(id) })
            };
            let others = listed.top.iter().zip(1..).filter(|((other, _), _)| other != id);
            let others = others.map(|(&(id, logprob), rank)| token(id, logprob, rank));
            Some(Position(std::iter::once(token(*id, listed.logprob, listed.rank)).chain(others).collect()))
        };
        let rest = ids.iter().skip(1).zip(logprobs).map(position);
        Self(std::iter::once(None).chain(rest).collect())
    }
}
