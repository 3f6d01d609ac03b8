//! vLLM's fields that the Messages and Responses APIs take beside their own.

use super::generation::GenerationFields;
use super::values::{Count, Int, LogitBias, Text, TokenId};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

/// How to draw tokens, and arguments of the chat template.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ExtensionFields {
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
    /// Token ids that end the text, at most 128.
    pub stop_token_ids: Option<Vec<TokenId>>,
    /// Minimum number of tokens to generate.
    pub min_tokens: Option<Count<0>>,
    /// Go on past the end of the text.
    pub ignore_eos: Option<bool>,
    /// False shows special tokens in the text.
    pub skip_special_tokens: Option<bool>,
    /// Lower numbers leave the queue first.
    pub priority: Option<Int<{ i32::MIN as i64 }, { i32::MAX as i64 }>>,
    /// Share cached prefixes only with requests of the same salt.
    pub cache_salt: Option<String>,
    /// Becomes part of the response's id.
    pub request_id: Option<String>,
    /// Arguments of the chat template, such as enable_thinking.
    pub chat_template_kwargs: Option<Map<String, Value>>,
}

impl ExtensionFields {
    /// The fields as those of a generation.
    pub fn generation(self) -> GenerationFields {
        GenerationFields {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            seed: self.seed,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repetition_penalty: self.repetition_penalty,
            logit_bias: self.logit_bias,
            allowed_token_ids: self.allowed_token_ids,
            bad_words: self.bad_words,
            stop_token_ids: self.stop_token_ids,
            min_tokens: self.min_tokens,
            ignore_eos: self.ignore_eos,
            skip_special_tokens: self.skip_special_tokens,
            priority: self.priority,
            cache_salt: self.cache_salt,
            request_id: self.request_id,
            ..GenerationFields::default()
        }
    }
}
