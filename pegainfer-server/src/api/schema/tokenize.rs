//! Fields of `/tokenize` and `/detokenize`.

use super::numbers::TokenId;
use schemars::JsonSchema;
use serde::Deserialize;

/// A text to tokenize; a conversation may take its place.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct TokenizeFields {
    /// A served name; the first one by default.
    pub model: Option<String>,
    /// The text.
    pub prompt: Option<String>,
    /// Let the tokenizer add its special tokens, such as BOS.
    pub add_special_tokens: Option<bool>,
    /// Also send the tokens as strings.
    pub return_token_strs: Option<bool>,
}

/// Tokens to detokenize.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct DetokenizeFields {
    /// A served name; the first one by default.
    pub model: Option<String>,
    /// Token ids.
    #[schemars(required)]
    pub tokens: Option<Vec<TokenId>>,
}
