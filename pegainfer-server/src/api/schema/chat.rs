//! Fields of `/v1/chat/completions` only.

use super::generation::MAX_LOGPROBS;
use super::numbers::{Count, Int};
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
}
