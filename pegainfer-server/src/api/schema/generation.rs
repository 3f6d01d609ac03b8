//! Fields that completions and chats share: how much to generate, and what to report.

use super::keep_alive::KeepAliveField;
use super::numbers::{Count, Int};
use super::values::{Object, Texts, names};
use pegainfer_core::engine;
use schemars::JsonSchema;
use serde::Deserialize;

/// Maximum number of most likely tokens that may be asked for at each position, as in OpenAI's chat API.
pub const MAX_LOGPROBS: i64 = engine::MAX_LOGPROBS as i64;

/// How much to generate, and what to report.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct GenerationFields {
    /// A served name; the first one by default.
    pub model: Option<String>,
    /// How long the model stays in memory after its last request, if it is not pinned: seconds, or a text such as "5m";
    /// 0 unloads it at once, -1 keeps it until others need its memory.
    pub keep_alive: Option<KeepAliveField>,
    /// Send events as tokens are generated.
    pub stream: Option<bool>,
    /// Options of a stream; only allowed with "stream": true.
    pub stream_options: Option<Object<StreamOptionsFields>>,
    /// Maximum number of tokens to generate; less if the context is full earlier. 0 needs echo.
    pub max_tokens: Option<Count<0>>,
    /// The newer name of max_tokens; it wins.
    pub max_completion_tokens: Option<Count<1>>,
    /// Number of choices for each prompt.
    pub n: Option<Int<1, 128>>,
    /// Must be equal to n.
    pub best_of: Option<Int<1, 128>>,
    /// Strings that end the text, at most 16.
    pub stop: Option<Texts>,
    /// Include the stop string in the text.
    pub include_stop_str_in_output: Option<bool>,
    /// Let the tokenizer add its special tokens, such as BOS.
    pub add_special_tokens: Option<bool>,
    /// Truncate the prompt to this many tokens; -1 truncates it to the context.
    pub truncate_prompt_tokens: Option<Count<-1>>,
    /// Side of the prompt that is truncated.
    pub truncation_side: Option<Side>,
    /// Number of most likely tokens to report at each position of the prompt.
    pub prompt_logprobs: Option<Int<0, MAX_LOGPROBS>>,
    /// Send token ids with the text.
    pub return_token_ids: Option<bool>,
    /// Name tokens token_id:N in log-probabilities.
    pub return_tokens_as_token_ids: Option<bool>,
    /// Report the time of each stage, with the token counts.
    pub include_metrics: Option<bool>,
}

/// Options of a stream.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct StreamOptionsFields {
    /// Send one more chunk at the end, with the token counts.
    pub include_usage: Option<bool>,
    /// Send the token counts so far in every chunk.
    pub continuous_usage_stats: Option<bool>,
    /// Only false: chunks are not padded.
    pub include_obfuscation: Option<bool>,
}

names! {
    /// Side of a prompt.
    Side {
        /// The beginning.
        Left = "left",
        /// The end.
        Right = "right",
    }
}
