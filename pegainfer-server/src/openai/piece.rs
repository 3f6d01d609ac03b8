//! What a client learns of a running choice.

use pegainfer_core::engine::{TokenLogprobs, TokenOut};
use serde::Serialize;

/// What a client learns at once: usually one token.
#[derive(Debug)]
pub struct Piece {
    /// Text that is certain by now; may be empty while part of a character or of a stop string is held back.
    pub text: String,
    /// The token, if one caused this piece.
    pub token: Option<TokenOut>,
    /// Characters of text before this token.
    pub offset: usize,
    /// Present on the last piece.
    pub finish: Option<Finish>,
    /// Present on the first piece, if anything about the prompt was asked for.
    pub prompt: Option<Prompt>,
}

/// What a client may want to know about its prompt.
#[derive(Debug)]
pub struct Prompt {
    /// The prompt.
    pub ids: Vec<u32>,
    /// About all of its tokens but the first, if asked for.
    pub reports: Option<Vec<TokenLogprobs>>,
}

/// How a choice ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Finish {
    /// `stop` or `length`.
    pub reason: &'static str,
    /// What stopped it; `None` for the end of the text and for `length`.
    pub stop_reason: Option<StopReason>,
}

/// vLLM's `stop_reason`.
#[derive(Debug, Clone, PartialEq, Serialize)]
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
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens generated so far, the one that stopped it included.
    pub completion: usize,
    /// Prompt tokens found in the prefix cache.
    pub cached: usize,
}
