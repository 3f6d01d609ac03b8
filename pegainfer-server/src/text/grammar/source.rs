//! What a grammar is made from.

use llguidance::regex_to_lark;
use serde_json::{Value, json};

/// White space between the parts of JSON: room for an indented document, not for a model that writes nothing else.
const JSON_WHITESPACE: &str = "[ \\n\\r\\t]{1,40}";

/// What a text must be.
#[derive(Debug, Clone, PartialEq)]
pub enum GrammarSource {
    /// JSON of this schema.
    JsonSchema(Value),
    /// All of it matches, in the syntax of the `regex` crate.
    Regex(String),
    /// One of these.
    Choice(Vec<String>),
    /// A grammar in llguidance's variant of Lark.
    Lark(String),
}

impl GrammarSource {
    /// Its length.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::JsonSchema(schema) => schema.to_string().len(),
            Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(String::len).sum(),
        }
    }

    /// The body of a rule of a Lark grammar; `None` for a grammar, which has rules of its own.
    pub fn rule(&self) -> Option<String> {
        match self {
            Self::JsonSchema(schema) => Some(format!("%json {}", with_options(schema.clone(), false))),
            Self::Regex(regex) => Some(format!("/{}/", regex_to_lark(regex, ""))),
            Self::Choice(texts) => {
                Some(texts.iter().map(|text| json!(text).to_string()).collect::<Vec<_>>().join(" | "))
            }
            Self::Lark(_) => None,
        }
    }
}

/// A schema with our settings. `lenient` leaves out what cannot be enforced.
pub fn with_options(mut schema: Value, lenient: bool) -> Value {
    if let Some(schema) = schema.as_object_mut() {
        schema.insert("x-guidance".into(), json!({"whitespace_pattern": JSON_WHITESPACE, "lenient": lenient}));
    }
    schema
}
