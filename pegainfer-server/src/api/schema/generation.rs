//! Fields that completions and chats share: how to generate.

use super::values::{Count, Int, LogitBias, Object, Text, Texts, TokenId, names};
use pegainfer_core::engine;
use schemars::JsonSchema;
use serde::Deserialize;

/// Maximum number of most likely tokens that may be asked for at each position, as in OpenAI's chat API.
pub const MAX_LOGPROBS: i64 = engine::MAX_LOGPROBS as i64;

/// How to generate.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct GenerationFields {
    /// A served name; the first one by default.
    pub model: Option<String>,
    /// Send events as tokens are generated.
    pub stream: Option<bool>,
    /// Options of a stream; only allowed with "stream": true.
    pub stream_options: Option<Object<StreamOptionsFields>>,
    /// Maximum number of tokens to generate; less if the context is full before. 0 needs echo.
    pub max_tokens: Option<Count<0>>,
    /// The newer name of max_tokens; it wins.
    pub max_completion_tokens: Option<Count<1>>,
    /// Minimum number of tokens to generate.
    pub min_tokens: Option<Count<0>>,
    /// Number of choices for each prompt.
    pub n: Option<Int<1, 128>>,
    /// Must be equal to n.
    pub best_of: Option<Int<1, 128>>,
    /// Divisor of the logits, 0 to 100; 0 is greedy.
    #[schemars(range(min = 0, max = 100))]
    pub temperature: Option<f64>,
    /// Probability mass that is kept, above 0 and at most 1.
    #[schemars(range(min = 0, max = 1))]
    pub top_p: Option<f64>,
    /// Number of most likely tokens that are kept; 0 or -1 keeps all.
    pub top_k: Option<Count<-1>>,
    /// Minimum probability of a kept token, relative to the most likely token.
    #[schemars(range(min = 0, max = 1))]
    pub min_p: Option<f64>,
    /// The same seed draws the same tokens.
    pub seed: Option<i64>,
    /// Makes tokens that were generated less likely, -2 to 2.
    #[schemars(range(min = -2, max = 2))]
    pub presence_penalty: Option<f64>,
    /// Makes tokens less likely by how often they were generated, -2 to 2.
    #[schemars(range(min = -2, max = 2))]
    pub frequency_penalty: Option<f64>,
    /// Makes tokens of the prompt and the text less likely, 0.01 to 100; 1 is none.
    #[schemars(range(min = 0.01, max = 100))]
    pub repetition_penalty: Option<f64>,
    /// Token ids to what is added to their logits, -100 to 100.
    pub logit_bias: Option<LogitBias>,
    /// The only tokens that may be drawn.
    pub allowed_token_ids: Option<Vec<TokenId>>,
    /// Strings that must not be generated, at most 128.
    pub bad_words: Option<Vec<Text>>,
    /// Strings that end the text, at most 16.
    pub stop: Option<Texts>,
    /// Token ids that end the text, at most 128.
    pub stop_token_ids: Option<Vec<TokenId>>,
    /// Include the stop string in the text.
    pub include_stop_str_in_output: Option<bool>,
    /// Go on past the end of the text.
    pub ignore_eos: Option<bool>,
    /// False shows special tokens in the text.
    pub skip_special_tokens: Option<bool>,
    /// Let the tokenizer add its special tokens, such as BOS.
    pub add_special_tokens: Option<bool>,
    /// Truncate the prompt to this many tokens; -1: to what fits the context.
    pub truncate_prompt_tokens: Option<Count<-1>>,
    /// Side of the prompt that is truncated.
    pub truncation_side: Option<Side>,
    /// Number of most likely tokens to report at each position of the prompt.
    pub prompt_logprobs: Option<Int<0, MAX_LOGPROBS>>,
    /// Send token ids with the text.
    pub return_token_ids: Option<bool>,
    /// Name tokens token_id:N in log-probabilities.
    pub return_tokens_as_token_ids: Option<bool>,
    /// Lower numbers leave the queue first.
    pub priority: Option<Int<{ i32::MIN as i64 }, { i32::MAX as i64 }>>,
    /// Share cached prefixes only with requests of the same salt.
    pub cache_salt: Option<String>,
    /// Becomes part of the response's id.
    pub request_id: Option<String>,
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
