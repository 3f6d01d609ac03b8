//! `response_format` and `structured_outputs`: the structure that the output must have.

use super::fields::{Fields, describe};
use super::state::AppState;
use crate::error::{ApiError, truncate_for_error};
use crate::text::GrammarSource;
use pegainfer_core::grammar::Grammar;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Maximum number of entries of `structured_outputs.choice`.
const MAX_CHOICES: usize = 1024;
/// Maximum size of `regex`, `grammar` and all of `choice`, in bytes: the time to compile them grows with their square.
const MAX_PATTERN: usize = 16 << 10;
/// Names that older vLLM clients send instead of `structured_outputs`; ignoring them would give unconstrained text.
const RENAMED: [(&str, &str); 4] =
    [("guided_json", "json"), ("guided_regex", "regex"), ("guided_choice", "choice"), ("guided_grammar", "grammar")];

/// The structure of an output, and the field that asks for it.
#[derive(Debug, PartialEq)]
pub struct Structured {
    /// Name of the field, for errors.
    pub field: &'static str,
    /// Grammar of the allowed texts.
    pub source: GrammarSource,
}

impl Structured {
    /// Parses both fields, which exclude each other.
    pub fn parse(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        if let Some((old, new)) = RENAMED.iter().find(|(old, _)| fields.has(old)) {
            return Err(ApiError::invalid(old, format!("{old} has a new name: send {new} in structured_outputs")));
        }
        let format = fields.object("response_format")?.map(response_format).transpose()?.flatten();
        let outputs = fields.object("structured_outputs")?.map(structured_outputs).transpose()?.flatten();
        match (format, outputs) {
            (Some(_), Some(_)) => {
                Err(ApiError::invalid("structured_outputs", "send either response_format or structured_outputs"))
            }
            (Some(source), None) => Ok(Some(Self { field: "response_format", source })),
            (None, Some(source)) => Ok(Some(Self { field: "structured_outputs", source })),
            (None, None) => Ok(None),
        }
    }

    /// Compiles the grammar, if there is one, on a blocking thread; a 400 names the field if it cannot be compiled.
    pub async fn compile(this: Option<Self>, state: &Arc<AppState>) -> Result<Option<Arc<dyn Grammar>>, ApiError> {
        let Some(Self { field, source }) = this else { return Ok(None) };
        // Limits the threads that one client's large schemas can occupy.
        let slot = state.compiling.acquire().await;
        let _slot = slot.map_err(|e| ApiError::internal(format!("the grammar could not be compiled: {e}")))?;
        let compiler = state.clone();
        let compiled = tokio::task::spawn_blocking(move || compiler.grammars.compile(source)).await;
        let compiled = compiled.map_err(|e| ApiError::internal(format!("the grammar could not be compiled: {e}")))?;
        compiled
            .map(Some)
            .map_err(|e| ApiError::invalid(field, format!("{field} cannot be used: {}", truncate_for_error(&e))))
    }
}

/// Parses OpenAI's `response_format`; `None` for type `text`.
fn response_format(format: Map<String, Value>) -> Result<Option<GrammarSource>, ApiError> {
    let invalid = |message: String| Err(ApiError::invalid("response_format", message));
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(GrammarSource::JsonSchema(json!({"type": "object"})))),
        Some("json_schema") => match format.get("json_schema").map(|inner| &inner["schema"]) {
            Some(schema @ (Value::Object(_) | Value::Bool(_))) => Ok(Some(GrammarSource::JsonSchema(schema.clone()))),
            _ => invalid("response_format.json_schema.schema is missing or no JSON schema".into()),
        },
        Some(other) => {
            let message = format!("response_format.type {:?} is not implemented", truncate_for_error(other));
            Err(ApiError::invalid("response_format", message).with_code("unsupported_parameter"))
        }
        None => invalid("response_format.type must be text, json_object or json_schema".into()),
    }
}

/// Parses vLLM's `structured_outputs`; `None` if it asks for nothing.
fn structured_outputs(outputs: Map<String, Value>) -> Result<Option<GrammarSource>, ApiError> {
    let invalid = |message: String| ApiError::invalid("structured_outputs", message);
    let mut outputs = Fields::new(outputs);
    let mut sources = Vec::new();
    if let Some(schema) = outputs.remove("json") {
        sources.push(GrammarSource::JsonSchema(schema_of(schema)?));
    }
    if outputs.remove("json_object").is_some_and(|enabled| enabled == true) {
        sources.push(GrammarSource::JsonSchema(json!({"type": "object"})));
    }
    for (name, source) in
        [("regex", GrammarSource::Regex as fn(String) -> GrammarSource), ("grammar", GrammarSource::Lark)]
    {
        match outputs.remove(name) {
            None => {}
            Some(Value::String(text)) if text.len() > MAX_PATTERN => {
                let message =
                    format!("structured_outputs.{name} has {} bytes, at most {MAX_PATTERN} are taken", text.len());
                return Err(invalid(message));
            }
            Some(Value::String(text)) => sources.push(source(text)),
            Some(other) => {
                return Err(invalid(format!("structured_outputs.{name} must be a string, got {}", describe(&other))));
            }
        }
    }
    if let Some(choices) = outputs.remove("choice") {
        sources.push(GrammarSource::Choice(choice(&choices)?));
    }
    if let Some((name, _)) = outputs.rest().iter().find(|(_, value)| **value != false) {
        let message = format!("structured_outputs.{} is not implemented", truncate_for_error(name));
        return Err(invalid(message).with_code("unsupported_parameter"));
    }
    match sources.len() {
        0 | 1 => Ok(sources.pop()),
        _ => {
            Err(invalid("structured_outputs may hold only one of json, json_object, regex, choice and grammar".into()))
        }
    }
}

/// Parses a schema, which may be written as a string.
fn schema_of(schema: Value) -> Result<Value, ApiError> {
    let invalid = |message| ApiError::invalid("structured_outputs", message);
    match schema {
        Value::String(text) => serde_json::from_str(&text)
            .map_err(|e| invalid(format!("structured_outputs.json is a string that is not valid JSON: {e}"))),
        Value::Object(_) | Value::Bool(_) => Ok(schema),
        other => Err(invalid(format!("structured_outputs.json must be a JSON schema, got {}", describe(&other)))),
    }
}

/// Parses `choice`: a list of texts.
fn choice(choices: &Value) -> Result<Vec<String>, ApiError> {
    let texts = choices.as_array().filter(|list| (1..=MAX_CHOICES).contains(&list.len()));
    let texts: Option<Vec<String>> =
        texts.and_then(|list| list.iter().map(|text| text.as_str().map(str::to_owned)).collect());
    let texts = texts.filter(|texts| texts.iter().map(String::len).sum::<usize>() <= MAX_PATTERN);
    texts.ok_or_else(|| {
        let message = format!(
            "structured_outputs.choice must be a list of 1 to {MAX_CHOICES} strings of at most {MAX_PATTERN} bytes in all"
        );
        ApiError::invalid("structured_outputs", message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: Value) -> Result<Option<GrammarSource>, ApiError> {
        let taken = Structured::parse(&mut Fields::new(body.as_object().unwrap().clone()))?;
        Ok(taken.map(|structured| structured.source))
    }

    #[test]
    fn the_forms() {
        let schema = || json!({"type": "integer"});
        let json_schema = Some(GrammarSource::JsonSchema(schema()));
        let object = Some(GrammarSource::JsonSchema(json!({"type": "object"})));
        for (body, expected) in [
            (json!({}), None),
            (json!({"response_format": {"type": "text"}, "structured_outputs": {}}), None),
            (json!({"response_format": {"type": "json_object"}}), object.clone()),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema()}}}),
                json_schema.clone(),
            ),
            (json!({"structured_outputs": {"json": schema(), "regex": null}}), json_schema.clone()),
            (json!({"structured_outputs": {"json": "{\"type\": \"integer\"}"}}), json_schema),
            (json!({"structured_outputs": {"json_object": true, "disable_any_whitespace": false}}), object),
            (json!({"structured_outputs": {"regex": "a+"}}), Some(GrammarSource::Regex("a+".into()))),
            (
                json!({"structured_outputs": {"grammar": "start: \"a\""}}),
                Some(GrammarSource::Lark("start: \"a\"".into())),
            ),
            (
                json!({"structured_outputs": {"choice": ["a\"b", "ü"]}}),
                Some(GrammarSource::Choice(vec!["a\"b".into(), "ü".into()])),
            ),
        ] {
            assert_eq!(parse(body.clone()).unwrap(), expected, "{body}");
        }
    }

    #[test]
    fn other_forms_are_refused_by_name() {
        for (body, field, expected) in [
            (json!({"response_format": {"type": "xml"}}), "response_format", "not implemented"),
            (json!({"response_format": {}}), "response_format", "must be text"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format", "schema is missing"),
            (json!({"structured_outputs": {"json": 5}}), "structured_outputs", "got 5"),
            (json!({"structured_outputs": {"json": "{"}}), "structured_outputs", "not valid JSON"),
            (json!({"structured_outputs": {"regex": ["a"]}}), "structured_outputs", "must be a string"),
            (json!({"structured_outputs": {"regex": "a".repeat(20_000)}}), "structured_outputs", "20000 bytes"),
            (json!({"structured_outputs": {"choice": ["a".repeat(20_000)]}}), "structured_outputs", "16384 bytes"),
            (json!({"structured_outputs": {"choice": []}}), "structured_outputs", "list of 1"),
            (json!({"structured_outputs": {"choice": ["a", 1]}}), "structured_outputs", "strings"),
            (json!({"structured_outputs": {"structural_tag": "x"}}), "structured_outputs", "structural_tag"),
            (json!({"structured_outputs": {"regex": "a", "json": {}}}), "structured_outputs", "only one"),
            (json!({"guided_json": {}}), "guided_json", "send json in structured_outputs"),
            (
                json!({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}),
                "structured_outputs",
                "either",
            ),
        ] {
            let error = parse(body.clone()).unwrap_err().body();
            assert!(error.contains(expected) && error.contains(&format!("\"param\":\"{field}\"")), "{body}: {error}");
        }
    }
}
