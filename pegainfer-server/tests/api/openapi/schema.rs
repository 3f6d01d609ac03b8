//! The document, and a check of values against its schemas.

use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The documented fields of a value; an error if the value does not fit the schema.
type Known = Result<BTreeSet<String>, String>;

/// Walks a schema, resolving references.
pub struct Document(pub Value);

impl Document {
    pub fn resolve<'a>(&'a self, schema: &'a Value) -> &'a Value {
        match schema["$ref"].as_str() {
            Some(reference) => self.0.pointer(reference.trim_start_matches('#')).unwrap(),
            None => schema,
        }
    }

    /// Checks a value against a schema. Unlike in JSON Schema, an object must not have undocumented fields.
    pub fn check(&self, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
        let known = self.known(schema, value, at)?;
        match value.as_object().and_then(|object| object.keys().find(|name| !known.contains(*name))) {
            Some(name) => Err(format!("{at}.{name} is not documented")),
            None => Ok(()),
        }
    }

    fn known(&self, schema: &Value, value: &Value, at: &str) -> Known {
        let schema = self.resolve(schema);
        let mut known = BTreeSet::new();
        let says = ["type", "properties", "anyOf", "oneOf", "allOf"].iter().any(|word| schema.get(word).is_some());
        if !says || schema["additionalProperties"] == json!(true) {
            known.extend(value.as_object().into_iter().flat_map(|object| object.keys().cloned()));
        }
        self.check_scalar(schema, value, at)?;
        for name in schema["required"].as_array().into_iter().flatten() {
            let name = name.as_str().unwrap();
            value.get(name).ok_or(format!("{at}.{name} is missing"))?;
        }
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            known.insert(name.clone());
            if let Some(value) = value.get(name) {
                self.check(property, value, &format!("{at}.{name}"))?;
            }
        }
        if schema["additionalProperties"].is_object() {
            for (name, value) in value.as_object().into_iter().flatten() {
                self.check(&schema["additionalProperties"], value, &format!("{at}.{name}"))?;
                known.insert(name.clone());
            }
        }
        for (i, item) in value.as_array().into_iter().flatten().enumerate().filter(|_| schema.get("items").is_some()) {
            self.check(&schema["items"], item, &format!("{at}[{i}]"))?;
        }
        for all in schema["allOf"].as_array().into_iter().flatten() {
            known.extend(self.known(all, value, at)?);
        }
        for one in ["anyOf", "oneOf"] {
            let Some(branches) = schema[one].as_array() else { continue };
            // The surrounding schema may document the fields of a branch.
            let fits = branches.iter().map(|branch| self.known(branch, value, at));
            let (fits, errors): (Vec<_>, Vec<_>) = fits.partition(Result::is_ok);
            if fits.is_empty() {
                return Err(format!("{at} fits none of {}: {errors:?}", branches.len()));
            }
            let best = fits.into_iter().flatten().max_by_key(|fit| {
                value.as_object().map_or(0, |object| object.keys().filter(|name| fit.contains(*name)).count())
            });
            known.extend(best.unwrap());
        }
        Ok(known)
    }

    fn check_scalar(&self, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
        let is = |kind: &Value| match kind.as_str().unwrap() {
            "null" => value.is_null(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_u64() || value.is_i64(),
            "number" => value.is_number(),
            "string" => value.is_string(),
            "array" => value.is_array(),
            _ => value.is_object(),
        };
        let fits = match &schema["type"] {
            Value::Null => true,
            Value::Array(kinds) => kinds.iter().any(is),
            kind => is(kind),
        };
        let allowed = schema["enum"].as_array().is_none_or(|all| all.contains(value));
        let constant = schema.get("const").is_none_or(|constant| constant == value);
        let short = schema["maxItems"].as_u64().is_none_or(|maximum| value.as_array().unwrap().len() as u64 <= maximum);
        if fits && allowed && constant && short { Ok(()) } else { Err(format!("{at} is {value}: {schema}")) }
    }
}
