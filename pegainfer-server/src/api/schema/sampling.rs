//! Fields that all generating endpoints share: OpenAI's and vLLM's ways to draw tokens, and the request's place in
//! queue and cache.

use super::numbers::{Count, Int, LogitBias, TokenId};
use super::values::Text;
use schemars::JsonSchema;
use serde::Deserialize;

/// How to draw tokens.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct SamplingFields {
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
    /// Map from token ids to values added to their logits, -100 to 100.
    pub logit_bias: Option<LogitBias>,
    /// The only tokens that may be drawn.
    pub allowed_token_ids: Option<Vec<TokenId>>,
    /// Strings that must not be generated, at most 128.
    pub bad_words: Option<Vec<Text>>,
    /// The same as token ids, for gRPC; no field of JSON.
    #[serde(skip)]
    pub bad_words_token_ids: Vec<Vec<u32>>,
    /// Token ids that end the text, at most 128.
    pub stop_token_ids: Option<Vec<TokenId>>,
    /// Minimum number of tokens to generate.
    pub min_tokens: Option<Count<0>>,
    /// Continue after the end-of-text token.
    pub ignore_eos: Option<bool>,
    /// False shows special tokens in the text.
    pub skip_special_tokens: Option<bool>,
    /// Lower numbers leave the queue first.
    pub priority: Option<Int<{ i32::MIN as i64 }, { i32::MAX as i64 }>>,
    /// Share cached prefixes only with requests of the same salt.
    pub cache_salt: Option<String>,
    /// Becomes part of the response's id.
    pub request_id: Option<String>,
}
