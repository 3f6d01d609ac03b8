//! The JSON that goes out. The order of the fields is the order on the wire.

use super::answer::Message;
use super::generation::{Counts, Finish, StopReason};
use super::logprobs::{ChatLogprobs, CompletionLogprobs};
use serde::Serialize;

/// A response, or a chunk of one.
#[derive(Serialize)]
pub struct Envelope<'a, C> {
    /// `cmpl-…` or `chatcmpl-…`.
    pub id: &'a str,
    /// Type name of OpenAI.
    pub object: &'static str,
    /// Unix time.
    pub created: u64,
    /// Name the client used.
    pub model: &'a str,
    /// `n` for each prompt, prompt by prompt.
    pub choices: Vec<C>,
    /// Outer `None` leaves the field out; inner `None` writes null.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
}

/// A choice of a completion, whole or as a chunk.
#[derive(Serialize)]
pub struct CompletionChoice {
    /// Number of the choice, see [`Envelope::choices`].
    pub index: usize,
    /// Text, or the next part of it.
    pub text: String,
    /// Present when asked for.
    pub logprobs: Option<CompletionLogprobs>,
    /// How it ended.
    #[serde(flatten)]
    pub end: End,
}

/// A choice of a chat completion.
#[derive(Serialize)]
pub struct ChatChoice {
    /// Number of the choice.
    pub index: usize,
    /// The answer.
    pub message: Message,
    /// Present when asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// How it ended.
    #[serde(flatten)]
    pub end: End,
}

/// A choice of a chat chunk.
#[derive(Serialize)]
pub struct ChatChunkChoice {
    /// Number of the choice.
    pub index: usize,
    /// What is new.
    pub delta: Message,
    /// Present when asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// How it ended.
    #[serde(flatten)]
    pub end: End,
}

/// `finish_reason` and `stop_reason`; both null until the end.
#[derive(Serialize, Default)]
pub struct End {
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
}

impl From<Option<Finish>> for End {
    fn from(finish: Option<Finish>) -> Self {
        match finish {
            Some(Finish { reason, stop_reason }) => Self { finish_reason: Some(reason), stop_reason },
            None => Self::default(),
        }
    }
}

/// Token counts of a response.
#[derive(Serialize)]
pub struct Usage {
    prompt_tokens: usize,
    total_tokens: usize,
    completion_tokens: usize,
    prompt_tokens_details: PromptDetails,
}

#[derive(Serialize)]
struct PromptDetails {
    cached_tokens: usize,
}

impl Usage {
    /// The sum over all choices, of which `n` in a row have the same prompt; that counts once, as in OpenAI's API.
    pub fn sum(counts: impl IntoIterator<Item = Counts>, n: usize) -> Self {
        let mut sum = Counts::default();
        for (choice, count) in counts.into_iter().enumerate() {
            if choice % n == 0 {
                sum.prompt += count.prompt;
                sum.cached += count.cached;
            }
            sum.completion += count.completion;
        }
        Self {
            prompt_tokens: sum.prompt,
            total_tokens: sum.prompt + sum.completion,
            completion_tokens: sum.completion,
            prompt_tokens_details: PromptDetails { cached_tokens: sum.cached },
        }
    }
}
