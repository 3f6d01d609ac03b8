//! Converts values that a model wrote without quotes to JSON, by the types of the tool's schema.

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

/// Type of one parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParameterType {
    kind: Kind,
    nullable: bool,
}

impl ParameterType {
    /// Looks the parameter up in the request's tools. Parameters without a schema are text.
    pub fn of(definitions: &[Value], function: &str, key: &str) -> Self {
        let tool = definitions.iter().find(|tool| tool["function"]["name"] == function);
        let schema = tool.map(|tool| &tool["function"]["parameters"]["properties"][key]);
        schema.map_or(Self { kind: Kind::Text, nullable: false }, Self::of_schema)
    }

    /// Type of a schema.
    pub fn of_schema(schema: &Value) -> Self {
        let mut names = Vec::new();
        type_names(schema, &mut names);
        let kind = names.iter().find(|&&name| name != "null").map_or(Kind::Text, |name| Kind::of(name));
        Self { kind, nullable: names.contains(&"null") || schema["nullable"] == true }
    }

    /// Whether every value is a string, so that its parts can be streamed.
    pub fn is_text(&self) -> bool {
        self.kind == Kind::Text && !self.nullable
    }

    /// Whether values are written as JSON.
    pub fn is_json(&self) -> bool {
        self.kind != Kind::Text
    }

    /// Converts a value to JSON; a value that does not match its type becomes a string.
    pub fn json(&self, text: &str) -> String {
        let trimmed = text.trim();
        if !self.is_text() && matches!(trimmed, "null" | "None") {
            return "null".into();
        }
        let typed = match self.kind {
            Kind::Text => None,
            Kind::Integer => integer(trimmed),
            Kind::Number => integer(trimmed).or_else(|| float(trimmed)),
            Kind::Boolean => boolean(trimmed),
            Kind::Json => serde_json::from_str(trimmed).ok(),
        };
        typed.unwrap_or_else(|| Value::from(text)).to_string()
    }
}

impl Kind {
    fn of(name: &str) -> Self {
        match name {
            "integer" => Self::Integer,
            "number" => Self::Number,
            "boolean" => Self::Boolean,
            "object" | "array" => Self::Json,
            _ => Self::Text,
        }
    }
}

/// Collects the type names of a schema, including those of its alternatives.
fn type_names<'a>(schema: &'a Value, names: &mut Vec<&'a str>) {
    match &schema["type"] {
        Value::String(name) => names.push(name),
        Value::Array(list) => names.extend(list.iter().filter_map(Value::as_str)),
        _ => {}
    }
    for alternatives in ["anyOf", "oneOf"] {
        for schema in schema[alternatives].as_array().into_iter().flatten() {
            type_names(schema, names);
        }
    }
}

fn integer(text: &str) -> Option<Value> {
    text.parse::<i64>().map(Value::from).or_else(|_| text.parse::<u64>().map(Value::from)).ok()
}

fn float(text: &str) -> Option<Value> {
    let value: f64 = text.parse().ok()?;
    // Whole numbers are written without a decimal point, as far as a double is exact.
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
        ParameterType::of_schema(&schema).json(text)
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
            (json!({"type": "boolean"}), "True", "true"),
            (json!({"type": "boolean"}), "yes", "\"yes\""),
            (json!({"type": "array"}), "[1, \"é\"]", "[1,\"é\"]"),
            (json!({"type": "object"}), "{\"b\": 1, \"a\": 2}", "{\"b\":1,\"a\":2}"),
            (json!({"type": "object"}), "{'a': 1}", "\"{'a': 1}\""),
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
        assert_eq!(ParameterType::of(&tools, "f", "n").kind, Kind::Integer);
        assert!(ParameterType::of(&tools, "f", "m").is_text());
        assert!(ParameterType::of(&tools, "g", "n").is_text());
    }
}
