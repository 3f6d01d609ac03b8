//! A parameter that a model writes between tags. Its value becomes a member of the arguments.

use super::arguments::Arguments;
use super::output::EventCollector;
use super::typed::{ParameterType, json};

/// How a value is converted to JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ValueType {
    /// A string, which is written in deltas.
    Text,
    /// A type decided by the tool's schema.
    Schema(ParameterType),
    /// JSON, regardless of the schema; other text becomes a string.
    Json,
}

/// A parameter that is being read.
#[derive(Debug)]
pub struct Parameter {
    pub key: String,
    value_type: ValueType,
    /// The value so far, if it is written as a whole.
    text: String,
    /// True if the value is written in deltas; false for a repeated key.
    streams: bool,
}

impl Parameter {
    /// Begins a parameter.
    pub fn begin(key: String, value_type: ValueType, arguments: &mut Arguments, out: &mut EventCollector) -> Self {
        let value_type = match value_type {
            ValueType::Schema(schema) if schema.is_text() => ValueType::Text,
            other => other,
        };
        let streams = value_type == ValueType::Text && arguments.open_text(&key, out);
        Self { key, value_type, text: String::new(), streams }
    }

    /// True if the value is always a string, which may contain text that looks like a tag.
    pub fn is_text(&self) -> bool {
        self.value_type == ValueType::Text
    }

    /// Appends text to the value.
    pub fn push(&mut self, text: &str, arguments: &Arguments, out: &mut EventCollector) {
        if self.streams {
            arguments.text(text, out);
        } else if !self.is_text() {
            self.text.push_str(text);
        }
    }

    /// Ends the value. `whole` is true if it was closed; otherwise it is kept only if it is text.
    pub fn end(self, whole: bool, arguments: &mut Arguments, out: &mut EventCollector) {
        let value = match &self.value_type {
            ValueType::Text => {
                if self.streams {
                    arguments.close_text(out);
                }
                return;
            }
            ValueType::Schema(schema) if whole || schema.begins_as_text() => schema.json(&self.text),
            ValueType::Json if whole && !self.text.trim().is_empty() => {
                Some(json(&self.text).unwrap_or_else(|| self.text.as_str().into()).to_string())
            }
            ValueType::Schema(_) | ValueType::Json => None,
        };
        if let Some(value) = value {
            arguments.member(&self.key, &value, out);
        }
    }
}
