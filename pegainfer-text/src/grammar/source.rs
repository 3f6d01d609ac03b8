//! Sources of grammars.

use super::error::GrammarError;
use super::{bounds, patterns};
use llguidance::regex_to_lark;
use serde_json::{Value, json};

/// White space between the elements of JSON: enough for an indented document, but bounded, because a model may write
/// nothing else.
const JSON_WHITESPACE: &str = "[ \\n\\r\\t]{1,40}";

/// Maximum size of a source, in bytes.
const MAX_SOURCE: usize = 512 << 10;

/// Source of a grammar: defines the allowed texts.
#[derive(Debug, Clone, PartialEq)]
pub enum GrammarSource {
    /// JSON that matches this schema.
    JsonSchema(Value),
    /// Texts that match completely, in the syntax of the `regex` crate.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in llguidance's variant of Lark.
    Lark(String),
}

impl GrammarSource {
    /// The source as a Lark grammar.
    ///
    /// # Errors
    /// The source is too large.
    pub fn into_lark(self) -> Result<String, GrammarError> {
        let lark = match (self.rule(), self) {
            (Some(rule), _) => format!("start: {rule}"),
            (None, Self::Lark(grammar)) => grammar,
            (None, _) => String::new(),
        };
        if lark.len() > MAX_SOURCE {
            let message = format!("it has {} bytes, at most {MAX_SOURCE} are compiled", lark.len());
            return Err(GrammarError::Limit(message));
        }
        Ok(lark)
    }

    /// The source as a Lark grammar, checked so that no single step of the compiler takes forever.
    ///
    /// # Errors
    /// The source is too large, or could take forever.
    pub fn into_checked_lark(self) -> Result<String, GrammarError> {
        let lark = self.into_lark()?;
        bounds::check(&lark)?;
        Ok(lark)
    }

    /// The source as the body of a Lark rule; `None` for a Lark grammar, which has its own rules.
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

/// Adds llguidance's options to a schema, and rewrites parts that llguidance cannot handle. `lenient` ignores keywords
/// that cannot be enforced.
pub fn with_options(mut schema: Value, lenient: bool) -> Value {
    patterns::rewrite(&mut schema);
    if let Some(schema) = schema.as_object_mut() {
        schema.insert("x-guidance".into(), json!({"whitespace_pattern": JSON_WHITESPACE, "lenient": lenient}));
    }
    schema
}
