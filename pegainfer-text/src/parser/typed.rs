//! Converts values without quotes to JSON, using the types of the tool's schema.

use super::format::definition;
use super::json_reader::whole;
use super::schema::{alternatives, type_name};
use serde_json::{Number, Value};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Integer,
    Number,
    Boolean,
    /// An object or a list.
    Json,
}

/// Type of one parameter: its schema's first alternative, or a later one if the value fits only there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterType {
    /// Types of the alternatives except null, in their order. Empty for text.
    kinds: Vec<Kind>,
    nullable: bool,
}

impl ParameterType {
    /// Looks the parameter up in the request's tools. Parameters without a schema are text.
    pub fn find(definitions: &[Value], function: &str, key: &str) -> Self {
        let parameters = definition(definitions, function).map_or(&Value::Null, |function| &function["parameters"]);
        Self::from_schema(parameters, &parameters["properties"][key])
    }

    /// Type of a schema. `root` holds the definitions that it may refer to.
    fn from_schema(root: &Value, schema: &Value) -> Self {
        let alternatives = alternatives(root, schema).unwrap_or_default();
        let names = || alternatives.iter().map(|schema| type_name(schema).unwrap_or("string"));
        let kinds = names().filter(|&name| name != "null").map(Kind::from_name).collect();
        let null = |schema: &Value| schema["enum"].as_array().is_some_and(|values| values.contains(&Value::Null));
        Self { kinds, nullable: names().any(|name| name == "null") || alternatives.iter().any(null) }
    }

    /// True if every value is a string, so that its parts can be streamed.
    pub fn is_text(&self) -> bool {
        self.first() == Kind::Text && !self.nullable
    }

    /// True if text of this type is a string, except for null.
    pub fn begins_as_text(&self) -> bool {
        self.first() == Kind::Text
    }

    fn first(&self) -> Kind {
        self.kinds.first().copied().unwrap_or(Kind::Text)
    }

    /// Converts a value to JSON. A value that does not match its type becomes a string. `None` for an empty value that
    /// is not text: its parameter is left out, so that the default applies.
    pub fn json(&self, text: &str) -> Option<String> {
        let trimmed = text.trim();
        if !self.is_text() && matches!(trimmed, "null" | "None") {
            return Some("null".into());
        }
        if self.begins_as_text() {
            return Some(Value::from(text).to_string());
        }
        if trimmed.is_empty() && !self.kinds.contains(&Kind::Text) {
            return None;
        }
        let typed = self.kinds.iter().find_map(|kind| match kind {
            Kind::Text => None,
            Kind::Integer => integer(trimmed).or_else(|| float(trimmed).filter(Value::is_i64)),
            Kind::Number => integer(trimmed).or_else(|| float(trimmed)),
            Kind::Boolean => boolean(trimmed),
            Kind::Json => json(trimmed),
        });
        Some(typed.unwrap_or_else(|| Value::from(text)).to_string())
    }
}

/// JSON or a Python literal.
pub fn json(text: &str) -> Option<Value> {
    let (json, sound) = whole(text);
    serde_json::from_str(&json).ok().filter(|_| sound)
}

impl Kind {
    fn from_name(name: &str) -> Self {
        match name {
            "integer" => Self::Integer,
            "number" => Self::Number,
            "boolean" => Self::Boolean,
            "object" | "array" => Self::Json,
            _ => Self::Text,
        }
    }
}

fn integer(text: &str) -> Option<Value> {
    text.parse::<i64>().map(Value::from).or_else(|_| text.parse::<u64>().map(Value::from)).ok()
}

/// The nearest double of a number. Words such as `inf`, and numbers beyond the range of doubles, are not numbers.
fn float(text: &str) -> Option<Value> {
    if text.contains(|c: char| c.is_ascii_alphabetic() && !c.eq_ignore_ascii_case(&'e')) {
        return None;
    }
    let value = text.parse::<f64>().ok().filter(|value| value.is_finite())?;
    let mantissa = text.split(['e', 'E']).next().unwrap_or_default();
    if value == 0.0 && mantissa.contains(|c| ('1'..='9').contains(&c)) {
        return None;
    }
    // Write whole numbers without a decimal point, as far as a double is exact.
    if value.fract() == 0.0 && value.abs() < 9e15 {
        return Some(Value::from(value as i64));
    }
    Number::from_f64(value).map(Value::Number)
}

fn boolean(text: &str) -> Option<Value> {
    match text.to_ascii_lowercase().as_str() {
        "true" => Some(Value::Bool(true)),
        "false" => Some(Value::Bool(false)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn convert(schema: Value, text: &str) -> String {
        ParameterType::from_schema(&Value::Null, &schema).json(text).unwrap_or_else(|| "left out".into())
    }

    #[test]
    fn values_take_the_type_of_their_schema() {
        let cases = [
            (json!({"type": "integer"}), "42", "42"),
            (json!({"type": "integer"}), "4.5", "\"4.5\""),
            (json!({"type": "integer"}), "18446744073709551615", "18446744073709551615"),
            (json!({"type": "number"}), "-0.5", "-0.5"),
            (json!({"type": "number"}), "5.0", "5"),
            (json!({"type": "number"}), "inf", "\"inf\""),
            (json!({"type": "number"}), "-2200.66e5420", "\"-2200.66e5420\""),
            (json!({"type": "number"}), "1e-400", "\"1e-400\""),
            (json!({"type": "number"}), "0e5", "0"),
            (json!({"type": "integer"}), "5.0", "5"),
            (json!({"type": "integer"}), "5e0", "5"),
            (json!({"type": "integer"}), "1e300", "\"1e300\""),
            (json!({"type": "integer"}), " \n", "left out"),
            (json!({"type": "number"}), "", "left out"),
            (json!({"type": "boolean"}), "", "left out"),
            (json!({"type": "array"}), "", "left out"),
            (json!({"type": "object"}), "", "left out"),
            (json!({"enum": [1, 2]}), "", "left out"),
            (json!({"type": ["integer", "null"]}), "", "left out"),
            (json!({"anyOf": [{"type": "integer"}, {"type": "string"}]}), "", "\"\""),
            (json!({"type": "string"}), "", "\"\""),
            (json!({"enum": [1, 2]}), "2", "2"),
            (json!({"anyOf": [{"type": "boolean"}, {"type": "object"}]}), "{}", "{}"),
            (json!({"type": "boolean"}), "True", "true"),
            (json!({"type": "boolean"}), "yes", "\"yes\""),
            (json!({"type": "array"}), "[1, \"é\"]", "[1,\"é\"]"),
            (json!({"type": "object"}), "{\"b\": 1, \"a\": 2}", "{\"b\":1,\"a\":2}"),
            (
                json!({"type": "object"}),
                "{'a': True, 'b': (1, 'it\\'s'), \"c\": None,}",
                "{\"a\":true,\"b\":[1,\"it's\"],\"c\":null}",
            ),
            (json!({"type": "array"}), "[\"a\", 'b',]", "[\"a\",\"b\"]"),
            (json!({"type": "object"}), "{\"a\": 1, \"a\": 2}", "{\"a\":1}"),
            (json!({"type": "object"}), "{'a': 1", "\"{'a': 1\""),
            (json!({"type": "object"}), "{a: b}", "\"{a: b}\""),
            (json!({"type": "array"}), "[1] and more", "\"[1] and more\""),
            (json!({"type": "array"}), "[1e400]", "\"[1e400]\""),
            (json!({"type": "string"}), "42", "\"42\""),
            (json!({"type": "string"}), "null", "\"null\""),
            (json!({"type": ["string", "null"]}), "None", "null"),
            (json!({"type": "integer"}), "null", "null"),
            (json!({"anyOf": [{"type": "null"}, {"type": "integer"}]}), "7", "7"),
            (json!({"enum": ["a", "b"]}), " a ", "\" a \""),
            (json!(null), "1", "\"1\""),
        ];
        for (schema, text, expected) in cases {
            assert_eq!(convert(schema.clone(), text), expected, "{text:?} as {schema}");
        }
    }

    #[test]
    fn parameters_are_found_by_function_and_name() {
        let tools = [json!({"type": "function", "function": {"name": "f", "parameters": {"properties": {
            "n": {"type": "integer"}}}}})];
        assert_eq!(ParameterType::find(&tools, "f", "n").kinds, [Kind::Integer]);
        assert!(ParameterType::find(&tools, "f", "m").is_text());
        assert!(ParameterType::find(&tools, "g", "n").is_text());
    }
}
