//! The fields of a request body, each removed by its parser. JSON `null` means "absent", everywhere.

use crate::error::ApiError;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// A request body. Fields that no parser has removed are unknown.
pub struct Fields(Map<String, Value>);

impl Fields {
    /// Wraps a body; fields that are `null` count as absent.
    pub fn new(mut body: Map<String, Value>) -> Self {
        body.retain(|_, value| !value.is_null());
        Self(body)
    }

    /// Removes a field of any type.
    pub fn remove(&mut self, name: &str) -> Option<Value> {
        self.0.shift_remove(name)
    }

    /// Whether the body has this field.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Removes a boolean.
    pub fn bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.remove_as(name, "true or false", |value| value.as_bool())
    }

    /// Removes an integer within `range`.
    pub fn integer(&mut self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let expected = format!("an integer from {} to {}", range.start(), range.end());
        self.remove_as(name, &expected, |value| value.as_i64().filter(|n| range.contains(n)))
    }

    /// Removes a string.
    pub fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.remove_as(name, "a string", |value| value.as_str().map(str::to_string))
    }

    /// Removes an object.
    pub fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        self.remove_as(name, "an object", |value| value.as_object().cloned())
    }

    /// Removes a list.
    pub fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        self.remove_as(name, "a list", |value| value.as_array().cloned())
    }

    /// The fields that no parser has removed.
    pub fn rest(self) -> Map<String, Value> {
        self.0
    }

    fn remove_as<T>(
        &mut self,
        name: &str,
        expected: &str,
        parse: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.remove(name) else { return Ok(None) };
        match parse(&value) {
            Some(parsed) => Ok(Some(parsed)),
            None => Err(ApiError::invalid(name, format!("{name} must be {expected}, got {}", describe(&value)))),
        }
    }
}

/// A short description of a value for error messages: scalars are shown, lists and objects are named.
pub fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(b) => b.to_string(),
        Value::Number(n) => n.to_string(),
        Value::String(s) => format!("\"{}\"", crate::error::truncate_for_error(s)),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(value: Value) -> Fields {
        Fields::new(value.as_object().unwrap().clone())
    }

    #[test]
    fn null_is_absent_and_wrong_types_name_the_field() {
        let mut fields = fields(json!({"a": null, "b": "x", "c": 1.5, "d": -1, "e": 1e30}));
        assert_eq!(fields.bool("a").unwrap(), None);
        let message = |error: ApiError| error.body();
        assert!(message(fields.bool("b").unwrap_err()).contains("b must be true or false, got \\\"x\\\""));
        assert!(message(fields.integer("c", 0..=9).unwrap_err()).contains("an integer from 0 to 9, got 1.5"));
        assert!(message(fields.integer("d", 0..=9).unwrap_err()).contains("got -1"));
        assert!(message(fields.integer("e", 0..=9).unwrap_err()).contains("got 1e+30"));
        assert!(fields.rest().is_empty());
    }
}
