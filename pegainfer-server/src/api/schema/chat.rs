//! Fields of `/v1/chat/completions` only.

use super::generation::MAX_LOGPROBS;
use super::numbers::{Count, Int, TokenId};
use super::token_in_out::NoFeatures;
use super::values::Object;
use schemars::JsonSchema;
use serde::Deserialize;

/// Report and reasoning fields of a chat.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct ChatFields {
    /// Report log-probabilities.
    pub logprobs: Option<bool>,
    /// Number of most likely tokens to report at each position; needs "logprobs": true.
    pub top_logprobs: Option<Int<0, MAX_LOGPROBS>>,
    /// Maximum number of reasoning tokens.
    pub thinking_token_budget: Option<Count<0>>,
    /// False leaves the reasoning out.
    pub include_reasoning: Option<bool>,
    /// The prompt, already rendered and tokenized; the messages are not rendered.
    pub tokens: Option<Object<TokensFields>>,
}

/// A prompt that somebody else rendered.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct TokensFields {
    /// Token ids of the prompt, at least one.
    #[schemars(required)]
    pub token_ids: Option<Vec<TokenId>>,
    /// Only empty lists: images come with messages only.
    pub features: Option<NoFeatures>,
}
