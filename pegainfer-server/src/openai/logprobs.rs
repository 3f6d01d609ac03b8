//! Log-probabilities in the two shapes of OpenAI.

use super::piece::{Piece, Prompt};
use crate::text::{Detokenizer, Tokenizer};
use pegainfer_core::engine::{TokenLogprobs, TokenOut};
use serde::{Serialize, Serializer};

/// JSON has no infinity: a token that cannot be drawn gets the value that vLLM gives it.
const MIN_LOGPROB: f32 = -9999.0;

/// Four parallel lists, one entry per token.
#[derive(Serialize, Default, Debug)]
pub struct CompletionLogprobs {
    text_offset: Vec<usize>,
    /// `None` for the first token of an echoed prompt: nothing comes before it.
    token_logprobs: Vec<Option<f32>>,
    tokens: Vec<String>,
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
    /// Knows their text.
    pub tokenizer: &'a Tokenizer,
    /// By id, as `token_id:5`.
    pub by_id: bool,
}

impl TokenNames<'_> {
    fn of(&self, id: u32) -> String {
        if self.by_id { format!("token_id:{id}") } else { self.tokenizer.token_text(id) }
    }
}

impl CompletionLogprobs {
    /// Of one piece; empty if no token caused it.
    pub fn of(piece: &Piece, names: &TokenNames) -> Self {
        let mut lists = Self::default();
        if let Some(TokenOut { id, logprobs: Some(logprobs), .. }) = &piece.token {
            lists.push(*id, piece.offset, Some(logprobs), names);
        }
        lists
    }

    /// Of an echoed prompt.
    pub fn of_prompt(prompt: &Prompt, names: &TokenNames) -> Self {
        let (mut lists, mut text, mut chars) = (Self::default(), Detokenizer::new(true), 0);
        let reports = std::iter::once(None).chain(prompt.reports.iter().flatten().map(Some));
        for (id, report) in prompt.ids.iter().zip(reports) {
            lists.push(*id, chars, report, names);
            let mut piece = String::new();
            text.push(names.tokenizer, *id, &mut piece);
            chars += piece.chars().count();
        }
        lists
    }

    fn push(&mut self, id: u32, offset: usize, report: Option<&TokenLogprobs>, names: &TokenNames) {
        let text = names.of(id);
        self.text_offset.push(offset);
        self.token_logprobs.push(report.map(|report| report.logprob.max(MIN_LOGPROB)));
        self.top_logprobs.push(report.map(|report| {
            // Different tokens may show as the same text; the more likely one is kept. The token itself is always listed.
            let mut top: Vec<(String, f32)> = Vec::with_capacity(report.top.len() + 1);
            let listed = report.top.iter().map(|&(id, logprob)| (names.of(id), logprob));
            for (text, logprob) in listed.chain([(text.clone(), report.logprob)]) {
                if !top.iter().any(|(other, _)| *other == text) {
                    top.push((text, logprob.max(MIN_LOGPROB)));
                }
            }
            TokenMap(top)
        }));
        self.tokens.push(text);
    }

    /// Appends the next piece's.
    pub fn extend(&mut self, next: Self) {
        self.text_offset.extend(next.text_offset);
        self.token_logprobs.extend(next.token_logprobs);
        self.tokens.extend(next.tokens);
        self.top_logprobs.extend(next.top_logprobs);
    }
}

/// One list, one entry per token.
#[derive(Serialize, Default, Debug)]
pub struct ChatLogprobs {
    content: Vec<ChatToken>,
}

#[derive(Serialize, Debug)]
struct ChatToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    top_logprobs: Vec<TopToken>,
}

#[derive(Serialize, Debug)]
struct TopToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    /// Of one piece; empty if no token caused it.
    pub fn of(piece: &Piece, names: &TokenNames) -> Self {
        let Some((token, logprobs)) = piece.token.as_ref().and_then(|t| Some((t, t.logprobs.as_ref()?))) else {
            return Self::default();
        };
        let entry = |id: u32, logprob: f32| {
            let bytes = names.tokenizer.token_bytes(id);
            TopToken { token: names.of(id), logprob: logprob.max(MIN_LOGPROB), bytes }
        };
        let TopToken { token, logprob, bytes } = entry(token.id, logprobs.logprob);
        let top_logprobs = logprobs.top.iter().map(|&(id, logprob)| entry(id, logprob)).collect();
        Self { content: vec![ChatToken { token, logprob, bytes, top_logprobs }] }
    }

    /// Appends the next piece's.
    pub fn extend(&mut self, next: Self) {
        self.content.extend(next.content);
    }
}

/// vLLM's `prompt_logprobs`: null for the first token, then for each one a map from token ids, its own first.
#[derive(Serialize, Debug)]
pub struct PromptLogprobs(Vec<Option<Position>>);

#[derive(Debug)]
struct Position(Vec<(u32, PromptToken)>);

#[derive(Serialize, Debug)]
struct PromptToken {
    logprob: f32,
    rank: u32,
    decoded_token: String,
}

impl Serialize for Position {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(id, token)| (id, token)))
    }
}

impl PromptLogprobs {
    /// `reports` are about `ids` from the second on.
    pub fn of(ids: &[u32], reports: &[TokenLogprobs], tokenizer: &Tokenizer) -> Self {
        let position = |(id, report): (&u32, &TokenLogprobs)| {
            let token = |id: u32, logprob: f32, rank: u32| {
                (id, PromptToken { logprob: logprob.max(MIN_LOGPROB), rank, decoded_token: tokenizer.token_text(id) })
            };
            let others = report.top.iter().zip(1..).filter(|((other, _), _)| other != id);
            let others = others.map(|(&(id, logprob), rank)| token(id, logprob, rank));
            Some(Position(std::iter::once(token(*id, report.logprob, report.rank)).chain(others).collect()))
        };
        let rest = ids.iter().skip(1).zip(reports).map(position);
        Self(std::iter::once(None).chain(rest).collect())
    }
}
