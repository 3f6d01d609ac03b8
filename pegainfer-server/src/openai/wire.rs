//! The JSON that goes out. The order of the fields is the order on the wire.

use super::answer::Message;
use super::logprobs::{ChatLogprobs, CompletionLogprobs, PromptLogprobs};
use super::params::Params;
use super::piece::{Counts, Finish, Prompt, StopReason};
use super::timings::Timings;
use crate::text::Tokenizer;
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
    /// Of a chat.
    #[serde(flatten)]
    pub prompt: Option<PromptFields>,
    /// Outer `None` leaves the field out; inner `None` writes null.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    /// Present when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<Timings>,
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
    /// Of this choice's prompt, on its first chunk.
    #[serde(flatten)]
    pub prompt: Option<PromptFields>,
    /// How it ended.
    #[serde(flatten)]
    pub end: End,
    /// Present when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

impl CompletionChoice {
    /// Appends the next chunk.
    pub fn extend(&mut self, next: Self) {
        self.text += &next.text;
        if let (Some(logprobs), Some(more)) = (&mut self.logprobs, next.logprobs) {
            logprobs.extend(more);
        }
        if let (Some(ids), Some(more)) = (&mut self.token_ids, next.token_ids) {
            ids.extend(more);
        }
        self.end = next.end;
    }
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
    /// Present when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
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
    /// Present when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// What vLLM adds about the prompt; absent unless asked for.
#[derive(Serialize)]
pub struct PromptFields {
    /// Of every token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// The tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

impl PromptFields {
    /// What of it was asked for.
    pub fn of(prompt: &Prompt, params: &Params, tokenizer: &Tokenizer) -> Option<Self> {
        let reports = prompt.reports.as_ref().filter(|_| params.prompt_logprobs.is_some());
        let prompt_logprobs = reports.map(|reports| PromptLogprobs::of(&prompt.ids, reports, tokenizer));
        let prompt_token_ids = params.token_ids.then(|| prompt.ids.clone());
        let any = prompt_logprobs.is_some() || prompt_token_ids.is_some();
        any.then_some(Self { prompt_logprobs, prompt_token_ids })
    }
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
    /// Tokens of the prompts.
    pub prompt_tokens: usize,
    /// Both together.
    pub total_tokens: usize,
    /// Tokens generated.
    pub completion_tokens: usize,
    prompt_tokens_details: PromptDetails,
}

#[derive(Serialize)]
struct PromptDetails {
    cached_tokens: usize,
}

impl Usage {
    /// Prompt tokens found in the prefix cache.
    pub fn cached_tokens(&self) -> usize {
        self.prompt_tokens_details.cached_tokens
    }

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
