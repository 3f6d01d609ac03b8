//! A parameter's schema with resolved references, for the tag format, in which the type decides how a value is written.

use serde_json::{Map, Value};

/// Maximum depth of followed references and alternatives.
const MAX_DEPTH: usize = 16;

/// The alternatives of a parameter's schema, each without `$ref`, `anyOf`, `oneOf`, a single `allOf` or a list of types
/// at its top. `None` if a reference cannot be resolved or the schema is too deep.
///
/// `root` is the schema of the function's parameters, which contains the shared definitions.
pub fn alternatives(root: &Value, schema: &Value) -> Option<Vec<Value>> {
    let mut found = Vec::new();
    collect(root, schema, 0, &mut found)?;
    Some(found)
}

fn collect(root: &Value, schema: &Value, depth: usize, found: &mut Vec<Value>) -> Option<()> {
    if depth > MAX_DEPTH {
        return None;
    }
    let Some(map) = schema.as_object() else {
        found.push(schema.clone());
        return Some(());
    };
    if map.get("nullable") == Some(&Value::Bool(true)) {
        found.push(serde_json::json!({"type": "null"}));
        return collect(root, &with(map, "nullable", None), depth + 1, found);
    }
    if let Some(Value::String(reference)) = map.get("$ref") {
        let target = root.pointer(reference.strip_prefix('#')?)?;
        return collect(root, &with(map, "$ref", Some(target)), depth + 1, found);
    }
    for name in ["anyOf", "oneOf", "allOf"] {
        let Some(Value::Array(list)) = map.get(name) else { continue };
        if name == "allOf" && list.len() != 1 {
            continue;
        }
        return list.iter().try_for_each(|inner| collect(root, &with(map, name, Some(inner)), depth + 1, found));
    }
    if let Some(Value::Array(types)) = map.get("type") {
        let one = |kind: &Value| {
            let mut map = map.clone();
            map.insert("type".into(), kind.clone());
            Value::Object(map)
        };
        found.extend(types.iter().map(one));
        return Some(());
    }
    found.push(schema.clone());
    Some(())
}

/// A schema without the keyword `name`, completed by the keywords of `inner`.
fn with(schema: &Map<String, Value>, name: &str, inner: Option<&Value>) -> Value {
    let mut merged = schema.clone();
    merged.shift_remove(name);
    for (key, value) in inner.and_then(Value::as_object).into_iter().flatten() {
        merged.insert(key.clone(), value.clone());
    }
    Value::Object(merged)
}

/// The type name of a schema without alternatives, taken from its values if it has no type; `None` if unknown.
pub fn type_name(schema: &Value) -> Option<&str> {
    let of_value = |value: &Value| match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let constant = || schema.get("const").map(of_value);
    let first = || schema.get("enum").and_then(|list| list.as_array()?.iter().find(|v| !v.is_null())).map(of_value);
    schema["type"].as_str().or_else(constant).or_else(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn references_and_alternatives_are_followed() {
        let root = json!({"$defs": {"unit": {"enum": ["C", "F"]}, "loop": {"$ref": "#/$defs/loop"}}});
        for (schema, expected) in [
            (json!({"$ref": "#/$defs/unit", "title": "U"}), Some(json!([{"title": "U", "enum": ["C", "F"]}]))),
            (
                json!({"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]}),
                Some(json!([{"enum": ["C", "F"]}, {"type": "null"}])),
            ),
            (json!({"allOf": [{"type": "string"}]}), Some(json!([{"type": "string"}]))),
            (json!({"type": ["integer", "null"]}), Some(json!([{"type": "integer"}, {"type": "null"}]))),
            (json!({"type": "string", "nullable": true}), Some(json!([{"type": "null"}, {"type": "string"}]))),
            (json!({"$ref": "#/$defs/missing"}), None),
            (json!({"$ref": "#/$defs/loop"}), None),
            (json!(true), Some(json!([true]))),
        ] {
            assert_eq!(alternatives(&root, &schema).map(Value::from), expected, "{schema}");
        }
    }

    #[test]
    fn values_tell_the_type_that_is_left_out() {
        assert_eq!(type_name(&json!({"enum": [1, 2]})), Some("number"));
        assert_eq!(type_name(&json!({"enum": [null, "a"]})), Some("string"));
        assert_eq!(type_name(&json!({"const": {"a": 1}})), Some("object"));
        assert_eq!(type_name(&json!({})), None);
    }
}
