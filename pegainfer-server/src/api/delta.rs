//! Output of a running choice, one delta at a time.

use pegainfer_core::engine::{TokenLogprobs, TokenOut};
use schemars::JsonSchema;
use serde::Serialize;
use std::sync::Arc;

/// New output of one choice: usually one token.
#[derive(Debug)]
pub struct Delta {
    /// Final text; may be empty while part of a character or of a stop string is held back.
    pub text: String,
    /// The token of this delta, if it has one.
    pub token: Option<TokenOut>,
    /// Number of characters of text before this token.
    pub offset: usize,
    /// Set on the last delta.
    pub finish: Option<Finish>,
    /// Set on the first delta, if the client asked for a field of the prompt.
    pub prompt: Option<PromptInfo>,
}

/// The prompt, for responses that repeat it.
#[derive(Debug)]
pub struct PromptInfo {
    /// Token ids of the prompt.
    pub ids: Arc<[u32]>,
    /// Log-probabilities of `ids[1..]`, if the client asked for them.
    pub logprobs: Option<Arc<[TokenLogprobs]>>,
}

/// The parts of one or all deltas of a choice that a response needs.
#[derive(Debug, Default)]
pub struct ChoiceOutput {
    /// The text.
    pub text: String,
    /// Each token, with the number of characters before it.
    pub tokens: Vec<(TokenOut, usize)>,
    /// The prompt, if the client asked for a field of it.
    pub prompt: Option<PromptInfo>,
    /// Set at the end.
    pub finish: Option<Finish>,
}

impl ChoiceOutput {
    /// Appends the next delta. `keeps_tokens` is true if the response shows more of the tokens than their text.
    pub fn push(&mut self, delta: Delta, keeps_tokens: bool) {
        self.text += &delta.text;
        self.tokens.extend(delta.token.filter(|_| keeps_tokens).map(|token| (token, delta.offset)));
        self.prompt = delta.prompt.or(self.prompt.take());
        self.finish = delta.finish;
    }
}

/// Why a choice ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Finish {
    /// `stop` or `length`.
    pub reason: &'static str,
    /// The stop string or token; `None` for the end of the text (EOS) and for `length`.
    pub stop_reason: Option<StopReason>,
}

/// vLLM's `stop_reason`.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum StopReason {
    /// A stop string.
    Text(String),
    /// One of the request's stop token ids.
    Token(u32),
}

/// Token counts of one choice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of prompt tokens.
    pub prompt: usize,
    /// Number of prompt tokens that stand for images.
    pub image_tokens: usize,
    /// Number of tokens generated so far, including the stop token.
    pub completion: usize,
    /// Number of prompt tokens found in the prefix cache.
    pub cached: usize,
}
