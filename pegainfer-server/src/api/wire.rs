//! The JSON of responses. The order of the fields is the order on the wire.

use super::assistant_message::AssistantMessage;
use super::delta::{Counts, Finish, PromptInfo, StopReason};
use super::logprobs::{ChatLogprobs, CompletionLogprobs, PromptLogprobs};
use super::params::Params;
use super::stream_options::StreamOptions;
use super::timings::Timings;
use pegainfer_text::Tokenizer;
use schemars::JsonSchema;
use serde::Serialize;

/// A whole response.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ResponseOf{C}")]
pub struct Envelope<'a, C> {
    /// `cmpl-…` or `chatcmpl-…`.
    pub id: &'a str,
    /// Object type, as OpenAI names it.
    pub object: &'static str,
    /// Unix time.
    pub created: u64,
    /// Model name that the client used.
    pub model: &'a str,
    /// Choices, prompt by prompt, `n` for each.
    pub choices: Vec<C>,
    /// Prompt fields of a chat.
    #[serde(flatten)]
    pub prompt: Option<PromptFields>,
    /// Token counts of all choices.
    pub usage: Usage,
    /// Timings, if the client asked for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<Timings>,
}

/// A chunk of a streamed response.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ChunkOf{C}")]
pub struct Chunk<'a, C> {
    /// The same in all chunks: `cmpl-…` or `chatcmpl-…`.
    pub id: &'a str,
    /// Object type, as OpenAI names it.
    pub object: &'static str,
    /// Unix time.
    pub created: u64,
    /// Model name that the client used.
    pub model: &'a str,
    /// One choice; none in the chunk that has only counts.
    pub choices: Vec<C>,
    /// Prompt fields of a chat, in the first chunk.
    #[serde(flatten)]
    pub prompt: Option<PromptFields>,
    /// Token counts, as `stream_options` asks for them.
    #[serde(skip_serializing_if = "ChunkUsage::is_absent")]
    #[schemars(with = "Option<Usage>")]
    pub usage: ChunkUsage,
    /// Timings, if the client asked for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<Timings>,
}

/// `usage` of a chunk.
#[derive(Serialize)]
#[serde(untagged)]
pub enum ChunkUsage {
    /// The field is left out.
    Absent,
    /// Null: the counts follow in an extra chunk.
    Null,
    /// Token counts.
    Counts(Usage),
}

impl ChunkUsage {
    /// `usage` of a chunk that reports no counts.
    pub fn none(options: StreamOptions) -> Self {
        if options.include_usage || options.continuous_usage { Self::Null } else { Self::Absent }
    }

    /// `usage` of a chunk with the counts so far, if the client wants them in every chunk.
    pub fn running_total(options: StreamOptions, usage: impl FnOnce() -> Usage) -> Self {
        if options.continuous_usage { Self::Counts(usage()) } else { Self::none(options) }
    }

    /// True if the field is left out.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

/// A choice of a completion, whole or as a chunk.
#[derive(Serialize, JsonSchema)]
pub struct CompletionChoice {
    /// Index of the choice, see [`Envelope::choices`].
    pub index: usize,
    /// The text, or in a chunk the next part of it.
    pub text: String,
    /// Log-probabilities, if the client asked for them.
    pub logprobs: Option<CompletionLogprobs>,
    /// Prompt fields of this choice, in its first chunk.
    #[serde(flatten)]
    pub prompt: Option<PromptFields>,
    /// Why the choice ended.
    #[serde(flatten)]
    pub finish: FinishFields,
    /// Token ids, if the client asked for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// A choice of a chat completion.
#[derive(Serialize, JsonSchema)]
pub struct ChatChoice {
    /// Index of the choice.
    pub index: usize,
    /// The assistant's message.
    pub message: AssistantMessage,
    /// Log-probabilities, if the client asked for them.
    pub logprobs: Option<ChatLogprobs>,
    /// Why the choice ended.
    #[serde(flatten)]
    pub finish: FinishFields,
    /// Token ids, if the client asked for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// A choice of a chat chunk.
#[derive(Serialize, JsonSchema)]
pub struct ChatChunkChoice {
    /// Index of the choice.
    pub index: usize,
    /// The new part of the assistant's message.
    pub delta: AssistantMessage,
    /// Log-probabilities, if the client asked for them.
    pub logprobs: Option<ChatLogprobs>,
    /// Why the choice ended.
    #[serde(flatten)]
    pub finish: FinishFields,
    /// Token ids, if the client asked for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// Prompt fields that vLLM adds; absent unless the client asked for them.
#[derive(Serialize, JsonSchema)]
pub struct PromptFields {
    /// Log-probabilities of every prompt token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// Token ids of the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

impl PromptFields {
    /// The fields that the client asked for.
    pub fn new(prompt: &PromptInfo, params: &Params, tokenizer: &Tokenizer) -> Option<Self> {
        let logprobs = prompt.logprobs.as_ref().filter(|_| params.prompt_logprobs.is_some());
        let prompt_logprobs = logprobs.map(|logprobs| PromptLogprobs::new(&prompt.ids, logprobs, tokenizer));
        let prompt_token_ids = params.token_ids.then(|| prompt.ids.to_vec());
        let any = prompt_logprobs.is_some() || prompt_token_ids.is_some();
        any.then_some(Self { prompt_logprobs, prompt_token_ids })
    }
}

/// `finish_reason` and `stop_reason`; both null until the end.
#[derive(Serialize, JsonSchema, Default)]
pub struct FinishFields {
    /// `stop`, `length` or `tool_calls`.
    finish_reason: Option<&'static str>,
    /// The stop string or the id of the stop token, if one ended the choice.
    stop_reason: Option<StopReason>,
}

impl From<Option<Finish>> for FinishFields {
    fn from(finish: Option<Finish>) -> Self {
        match finish {
            Some(Finish { reason, stop_reason }) => Self { finish_reason: Some(reason), stop_reason },
            None => Self::default(),
        }
    }
}

/// Token counts of a response.
#[derive(Serialize, JsonSchema)]
pub struct Usage {
    /// Number of prompt tokens, summed over the prompts.
    pub prompt_tokens: usize,
    /// Prompt and completion tokens together.
    pub total_tokens: usize,
    /// Number of generated tokens.
    pub completion_tokens: usize,
    /// Details of the prompt tokens.
    prompt_tokens_details: PromptDetails,
    /// Details of the generated tokens, in chats.
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens_details: Option<CompletionDetails>,
}

/// Details of the prompt tokens.
#[derive(Serialize, JsonSchema)]
struct PromptDetails {
    /// Prompt tokens that were found in the prefix cache.
    cached_tokens: usize,
    /// Prompt tokens that stand for images, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    multimodal_tokens: Option<usize>,
}

/// Details of the generated tokens.
#[derive(Serialize, JsonSchema)]
struct CompletionDetails {
    /// Generated tokens of reasoning.
    reasoning_tokens: usize,
}

impl Usage {
    /// Number of prompt tokens found in the prefix cache.
    pub fn cached_tokens(&self) -> usize {
        self.prompt_tokens_details.cached_tokens
    }

    /// Sums over all choices. `n` consecutive choices share a prompt, which counts once, as in OpenAI's API.
    pub fn sum(counts: impl IntoIterator<Item = Counts>, n: usize) -> Self {
        let mut sum = Counts::default();
        for (choice, count) in counts.into_iter().enumerate() {
            if choice % n == 0 {
                sum.prompt += count.prompt;
                sum.cached += count.cached;
                sum.image_tokens += count.image_tokens;
            }
            sum.completion += count.completion;
        }
        Self {
            prompt_tokens: sum.prompt,
            total_tokens: sum.prompt + sum.completion,
            completion_tokens: sum.completion,
            prompt_tokens_details: PromptDetails {
                cached_tokens: sum.cached,
                multimodal_tokens: Some(sum.image_tokens).filter(|&tokens| tokens > 0),
            },
            completion_tokens_details: None,
        }
    }

    /// Adds the number of reasoning tokens.
    pub fn with_reasoning(mut self, reasoning_tokens: usize) -> Self {
        self.completion_tokens_details = Some(CompletionDetails { reasoning_tokens });
        self
    }
}
