//! Grammars in recordings.

use crate::parser::ReasoningStart;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Constraints on the reasoning before the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReasoningLimits {
    /// How the reasoning starts.
    pub start: ReasoningStart,
    /// True if a tool call also ends the reasoning, as Qwen3.5 may write it.
    pub call_ends_it: bool,
    /// Maximum number of tokens between the tags; at the limit, `</think>` is the only allowed token.
    pub budget: Option<usize>,
}

/// Parts of a grammar, as JSON in the recording of a request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RecordedGrammar {
    /// Compiled from this Lark grammar.
    Lark(String),
    /// Text after reasoning.
    Reasoned {
        /// Limits on the reasoning.
        thinking: ReasoningLimits,
        /// The recorded grammar of the text; `None` for any text.
        output: Option<String>,
    },
}

impl fmt::Display for RecordedGrammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

impl FromStr for RecordedGrammar {
    type Err = serde_json::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        serde_json::from_str(text)
    }
}
