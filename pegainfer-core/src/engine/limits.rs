//! Limits of an engine, checked when a request is submitted, so that no impossible request is queued.

use super::GenerateRequest;
use crate::images;
use thiserror::Error;

/// Maximum number of most likely tokens per position that a request can ask for; see `GenerateRequest::logprobs`.
pub const MAX_LOGPROBS: usize = 20;

/// Reason why a request was refused at submit. Nothing was queued.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SubmitError {
    /// The bounded queue is full; retry later.
    #[error(
        "the server is busy: {queued} requests are queued, as many as it takes (--max-queued-requests); try again later"
    )]
    QueueFull {
        /// Requests queued now.
        queued: usize,
    },
    /// The prompt is empty.
    #[error("the prompt is empty: send at least one token")]
    EmptyPrompt,
    /// `max_tokens` is 0.
    #[error("max_tokens must be at least 1")]
    NothingToGenerate,
    /// The prompt fills the context, so no token could be generated.
    #[error(
        "the prompt has {prompt} tokens, but this model's context is {max_model_len} tokens and at least one must be \
         left to generate; shorten the prompt"
    )]
    PromptTooLong {
        /// Prompt tokens.
        prompt: usize,
        /// Context length.
        max_model_len: usize,
    },
    /// Prompt and `max_tokens` together exceed the context.
    #[error(
        "the prompt has {prompt} tokens and max_tokens is {max_tokens}: together more than this model's context of \
         {max_model_len} tokens; lower max_tokens or shorten the prompt"
    )]
    ContextExceeded {
        /// Prompt tokens.
        prompt: usize,
        /// Requested tokens.
        max_tokens: usize,
        /// Context length.
        max_model_len: usize,
    },
    /// The request needs more than the whole KV pool.
    #[error(
        "the request needs KV cache for {needed} tokens, but the pool holds {capacity}; lower max_tokens or start the \
         server with a larger --kv-cache-memory"
    )]
    NeverFits {
        /// Tokens the request may need.
        needed: usize,
        /// Tokens the pool holds.
        capacity: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token id {id} is not in the vocabulary of {vocab_size} tokens")]
    InvalidToken {
        /// The id.
        id: u32,
        /// Vocabulary size.
        vocab_size: usize,
    },
    /// More log-probabilities per token than a report holds.
    #[error("the {asked} most likely tokens were asked for, but at most {MAX_LOGPROBS} can be reported")]
    TooManyLogprobs {
        /// Requested number of tokens.
        asked: usize,
    },
    /// The images do not fit the prompt.
    #[error("the images do not fit the prompt: {reason}")]
    InvalidImages {
        /// What is wrong.
        reason: &'static str,
    },
    /// The request sets a field that the engine does not implement.
    #[error("{field} is not supported by this model")]
    Unsupported {
        /// API name of the field.
        field: &'static str,
    },
    /// The request names an engine that does not exist.
    #[error("X-data-parallel-rank is {engine}, but this server has {engines} engines, counted from 0")]
    NoSuchEngine {
        /// The named engine.
        engine: usize,
        /// Number of engines.
        engines: usize,
    },
    /// The request names an engine that has stopped.
    #[error("engine {engine} has stopped; leave X-data-parallel-rank out to use another one")]
    EngineLost {
        /// The named engine.
        engine: usize,
    },
    /// [`GenerateRequest::only_if_cached`] is set, and no prefix cache holds enough of the prompt.
    #[error("the prompt is not in the prefix cache: {cached} of its {prompt} tokens are there")]
    NotCached {
        /// Tokens of the prompt in the cache that holds the most.
        cached: usize,
        /// Prompt tokens.
        prompt: usize,
    },
    /// Every engine has stopped.
    #[error("the engine has stopped; restart the server")]
    EngineStopped,
}

/// Fixed properties of a running engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineLimits {
    /// Maximum tokens of prompt and completion together.
    pub max_model_len: usize,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Tokens of one KV block.
    pub block_size: usize,
    /// KV blocks of the pool.
    pub kv_blocks: usize,
    /// Element format of the KV cache: `bf16`, `fp8`, or `auto` for a format of the model's own.
    pub kv_cache_dtype: &'static str,
    /// Maximum number of running requests.
    pub max_num_seqs: usize,
    /// The checkpoint's end-of-text ids.
    pub eos_token_ids: Vec<u32>,
    /// Maximum number of draft tokens per sequence in a step; `None` if the engine does not draft.
    pub num_speculative_tokens: Option<usize>,
    /// Maximum number of distinct adapters in a step; 0 if the engine takes none.
    pub max_loras: usize,
    /// Elements of a vector, see [`GenerateRequest::vector`]; 0 if the engine reports none.
    pub hidden_size: usize,
    /// Id of the tokens of images; `None` if the engine does not read images.
    pub image_token: Option<u32>,
    /// API names of unsupported fields among `structured_outputs`, `prompt_logprobs` and `priority`.
    pub unsupported: &'static [&'static str],
}

impl EngineLimits {
    /// Number of tokens whose KV fits the pool.
    pub fn kv_capacity_tokens(&self) -> usize {
        self.kv_blocks * self.block_size
    }

    /// Refuses requests that can never be served. Pure: does not look at the queue.
    pub fn check(&self, request: &GenerateRequest) -> Result<(), SubmitError> {
        let (prompt, max_tokens) = (request.prompt.len(), request.max_tokens);
        if prompt == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if max_tokens == 0 {
            return Err(SubmitError::NothingToGenerate);
        }
        if let Some(asked) = request.logprobs.max(request.prompt_logprobs).filter(|&n| n > MAX_LOGPROBS) {
            return Err(SubmitError::TooManyLogprobs { asked });
        }
        let is_requested = |field: &str| match field {
            "structured_outputs" => request.grammar.is_some(),
            "prompt_logprobs" => request.prompt_logprobs.is_some(),
            "priority" => request.priority != 0,
            _ => false,
        };
        if request.adapter.is_some() && self.max_loras == 0 {
            return Err(SubmitError::Unsupported { field: "a LoRA adapter" });
        }
        if request.vector && self.hidden_size == 0 {
            return Err(SubmitError::Unsupported { field: "a vector" });
        }
        if let Some(field) = self.unsupported.iter().copied().find(|field| is_requested(field)) {
            return Err(SubmitError::Unsupported { field });
        }
        if prompt >= self.max_model_len {
            return Err(SubmitError::PromptTooLong { prompt, max_model_len: self.max_model_len });
        }
        if max_tokens > self.max_model_len - prompt {
            return Err(SubmitError::ContextExceeded { prompt, max_tokens, max_model_len: self.max_model_len });
        }
        self.check_capacity(request)?;
        self.check_images(request)?;
        // No early exit and equal integer widths, so that the loop is vectorised.
        let vocab_size = u32::try_from(self.vocab_size).unwrap_or(u32::MAX);
        let outside = |id: u32| id >= vocab_size;
        if request.prompt.iter().fold(false, |any, &id| any | outside(id))
            && let Some(id) = request.prompt.iter().copied().find(|&id| outside(id))
        {
            return Err(SubmitError::InvalidToken { id, vocab_size: self.vocab_size });
        }
        Ok(())
    }

    fn check_images(&self, request: &GenerateRequest) -> Result<(), SubmitError> {
        if request.images.is_empty() {
            return Ok(());
        }
        let Some(token) = self.image_token else { return Err(SubmitError::Unsupported { field: "an image" }) };
        images::check(&request.images, &request.prompt, token).map_err(|reason| SubmitError::InvalidImages { reason })
    }

    /// Tokens of a prompt before its last block, which is always computed.
    pub(super) fn tokens_before_last_block(&self, prompt: usize) -> usize {
        prompt.saturating_sub(1) / self.block_size * self.block_size
    }

    /// Refuses requests that need more than the whole KV pool.
    pub(super) fn check_capacity(&self, request: &GenerateRequest) -> Result<(), SubmitError> {
        // The last generated token's KV is never written.
        let needed = request.prompt.len() + request.max_tokens - 1;
        let capacity = self.kv_capacity_tokens();
        if needed > capacity { Err(SubmitError::NeverFits { needed, capacity }) } else { Ok(()) }
    }
}
