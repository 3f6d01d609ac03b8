//! Log-probabilities in the two shapes of OpenAI.

use super::generation::Piece;
use crate::text::Tokenizer;
use serde::{Serialize, Serializer};

/// JSON has no infinity: a token that cannot be drawn gets the value that vLLM gives it.
const MIN_LOGPROB: f32 = -9999.0;

/// Four parallel lists, one entry per token.
#[derive(Serialize, Default, Debug)]
pub struct CompletionLogprobs {
    text_offset: Vec<usize>,
    token_logprobs: Vec<f32>,
    tokens: Vec<String>,
    top_logprobs: Vec<TokenMap>,
}

/// Tokens by text, most likely first.
#[derive(Debug)]
struct TokenMap(Vec<(String, f32)>);

impl Serialize for TokenMap {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}

impl CompletionLogprobs {
    /// Of one piece; empty if no token caused it.
    pub fn of(piece: &Piece, tokenizer: &Tokenizer) -> Self {
        let mut lists = Self::default();
        let Some((token, logprobs)) = piece.token.as_ref().and_then(|t| Some((t, t.logprobs.as_ref()?))) else {
            return lists;
        };
        let text = tokenizer.token_text(token.id);
        // Different tokens may show as the same text; the more likely one is kept. The drawn token is always listed.
        let mut top: Vec<(String, f32)> = Vec::with_capacity(logprobs.top.len() + 1);
        let listed = logprobs.top.iter().map(|&(id, logprob)| (tokenizer.token_text(id), logprob));
        for (text, logprob) in listed.chain([(text.clone(), logprobs.logprob)]) {
            if !top.iter().any(|(other, _)| *other == text) {
                top.push((text, logprob.max(MIN_LOGPROB)));
            }
        }
        lists.text_offset.push(piece.offset);
        lists.token_logprobs.push(logprobs.logprob.max(MIN_LOGPROB));
        lists.tokens.push(text);
        lists.top_logprobs.push(TokenMap(top));
        lists
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
    pub fn of(piece: &Piece, tokenizer: &Tokenizer) -> Self {
        let Some((token, logprobs)) = piece.token.as_ref().and_then(|t| Some((t, t.logprobs.as_ref()?))) else {
            return Self::default();
        };
        let entry = |id: u32, logprob: f32| {
            let bytes = tokenizer.token_bytes(id);
            TopToken { token: String::from_utf8_lossy(&bytes).into_owned(), logprob: logprob.max(MIN_LOGPROB), bytes }
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
