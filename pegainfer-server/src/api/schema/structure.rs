//! `response_format` and `structured_outputs`: fields that ask for structured output.

use super::values::{Object, Text};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserializer, Error, MapAccess, Visitor};
use serde::{Deserialize, de};
use serde_json::Value;
use std::borrow::Cow;
use std::fmt;

/// The structure that the output must have.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct StructureFields {
    /// OpenAI's way to ask for JSON.
    pub response_format: Option<Object<ResponseFormatFields>>,
    /// vLLM's way to ask for structured output: one of json, json_object, regex, choice and grammar.
    pub structured_outputs: Option<Object<StructuredOutputsFields>>,
}

/// Format of the response.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct ResponseFormatFields {
    /// text, json_object or json_schema.
    #[serde(rename = "type")]
    #[schemars(required, extend("enum" = ["text", "json_object", "json_schema"]))]
    pub kind: Option<String>,
    /// The schema, for type json_schema.
    pub json_schema: Option<Object<NamedSchemaFields>>,
}

/// A JSON schema with a name.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct NamedSchemaFields {
    /// Has no effect.
    pub name: Option<String>,
    /// Has no effect.
    pub description: Option<String>,
    /// The output always satisfies the schema.
    pub strict: Option<bool>,
    /// The schema.
    pub schema: Option<JsonSchemaValue>,
}

/// vLLM's structured outputs.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct StructuredOutputsFields {
    /// A JSON schema, or the text of one.
    pub json: Option<SchemaOrText>,
    /// Any JSON object.
    pub json_object: Option<bool>,
    /// A regular expression.
    pub regex: Option<String>,
    /// Allowed outputs.
    pub choice: Option<Vec<Text>>,
    /// A Lark grammar.
    pub grammar: Option<String>,
    /// Only false.
    pub disable_any_whitespace: Option<bool>,
    /// Only false.
    pub disable_additional_properties: Option<bool>,
    /// Not implemented.
    pub whitespace_pattern: Option<String>,
    /// Not implemented.
    pub structural_tag: Option<Value>,
}

/// A JSON schema: an object, or true or false.
#[derive(Debug, Clone, PartialEq)]
pub struct JsonSchemaValue(pub Value);

/// A JSON schema, or its text, parsed.
#[derive(Debug, Clone, PartialEq)]
pub struct SchemaOrText(pub Value);

struct SchemaVisitor {
    accepts_text: bool,
}

impl<'de> Visitor<'de> for SchemaVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON schema")
    }

    fn visit_bool<E>(self, any: bool) -> Result<Value, E> {
        Ok(Value::Bool(any))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Value, A::Error> {
        Value::deserialize(de::value::MapAccessDeserializer::new(map))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
        if !self.accepts_text {
            return Err(E::invalid_type(de::Unexpected::Str(text), &self));
        }
        serde_json::from_str(text).map_err(|e| E::custom(format!("is a string that is not valid JSON: {e}")))
    }
}

impl<'de> Deserialize<'de> for JsonSchemaValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SchemaVisitor { accepts_text: false }).map(Self)
    }
}

impl<'de> Deserialize<'de> for SchemaOrText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SchemaVisitor { accepts_text: true }).map(Self)
    }
}

impl JsonSchema for JsonSchemaValue {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Schema".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": ["object", "boolean"]})
    }
}

impl JsonSchema for SchemaOrText {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "SchemaOrText".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": ["object", "boolean", "string"]})
    }
}
