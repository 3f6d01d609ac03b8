//! `response_format` and `structured_outputs`: the output's structure.

use super::body::RequestContext;
use super::model_state::ModelState;
use super::schema::structure::{
    JsonSchemaValue, ResponseFormatFields, SchemaOrText, StructureFields, StructuredOutputsFields,
};
use super::schema::values::{Object, Text};
use crate::error::{ApiError, truncate_for_error};
use crate::lifecycle::Deadline;
use crate::text_service::AccountedGrammar;
use pegainfer_text::{GrammarError, GrammarSource};
use serde_json::json;
use std::sync::Arc;

/// Maximum number of entries of `structured_outputs.choice`.
const MAX_CHOICES: usize = 1024;
/// Maximum size of `regex`, `grammar` and all of `choice`, in bytes. Compilation time grows with the square of it.
const MAX_PATTERN: usize = 16 << 10;
/// The structure of an output, and the request field that sets it.
#[derive(Debug, PartialEq)]
pub struct Structured {
    /// Name of the field, for errors.
    pub field: &'static str,
    /// Grammar of the allowed texts.
    pub source: GrammarSource,
}

impl Structured {
    /// The structure set by one of the fields; both exclude each other.
    pub fn read(fields: StructureFields) -> Result<Option<Self>, ApiError> {
        let format = fields.response_format.map(|Object(format)| response_format(format)).transpose()?.flatten();
        let outputs = fields.structured_outputs.map(|Object(outputs)| structured_outputs(outputs));
        match (format, outputs.transpose()?.flatten()) {
            (Some(_), Some(_)) => {
                Err(ApiError::invalid("structured_outputs", "send either response_format or structured_outputs"))
            }
            (Some(source), None) => Ok(Some(Self { field: "response_format", source })),
            (None, Some(source)) => Ok(Some(Self { field: "structured_outputs", source })),
            (None, None) => Ok(None),
        }
    }

    /// Replaces the source by its Lark grammar, the only part that a request keeps while it waits for the compiler.
    pub fn into_lark(self) -> Result<Self, ApiError> {
        let Self { field, source } = self;
        let lark = source.into_lark().map_err(|error| refusal(field, error))?;
        Ok(Self { field, source: GrammarSource::Lark(lark) })
    }

    /// Compiles the grammar, if there is one, before the deadline. If it cannot be compiled, the 400 names the field.
    /// The request keeps memory for the grammar and the `prompt` bytes of its prompt, and gives back the rest.
    pub async fn compile(
        this: Option<Self>,
        prompt: usize,
        context: &RequestContext,
        state: &ModelState,
    ) -> Result<Option<Arc<AccountedGrammar>>, ApiError> {
        let source = match &this {
            Some(Self { source: GrammarSource::Lark(lark), .. }) => lark.len(),
            _ => 0,
        };
        context.hold.keep(prompt + source);
        let Some(Self { field, source }) = this else { return Ok(None) };
        let compiled = state.model.text.grammars.compile(context.tenant, source);
        let compiled = Deadline::bound(context.deadline, compiled).await?;
        compiled.map(Some).map_err(|error| refusal(field, error))
    }
}

/// The refusal of a request without a grammar for this field.
fn refusal(field: &'static str, error: GrammarError) -> ApiError {
    match error {
        GrammarError::Invalid(reason) => {
            ApiError::invalid(field, format!("{field} cannot be used: {}", truncate_for_error(&reason)))
        }
        GrammarError::Limit(reason) => ApiError::invalid(field, format!("{field} cannot be used: {reason}")),
        GrammarError::Busy(reason) => ApiError::overloaded(format!("{field} cannot be compiled now: {reason}")),
    }
}

/// OpenAI's `response_format`; `None` for type `text`.
fn response_format(format: ResponseFormatFields) -> Result<Option<GrammarSource>, ApiError> {
    let invalid = |message: String| Err(ApiError::invalid("response_format", message));
    match format.kind.as_deref() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(GrammarSource::JsonSchema(json!({"type": "object"})))),
        Some("json_schema") => match format.json_schema.and_then(|Object(named)| named.schema) {
            Some(JsonSchemaValue(schema)) => Ok(Some(GrammarSource::JsonSchema(schema))),
            None => invalid("response_format.json_schema.schema is missing or not a JSON schema".into()),
        },
        Some(other) => {
            let message = format!("response_format.type {:?} is not implemented", truncate_for_error(other));
            Err(ApiError::invalid("response_format", message).with_code("unsupported_parameter"))
        }
        None => invalid("response_format.type must be text, json_object or json_schema".into()),
    }
}

/// vLLM's `structured_outputs`; `None` if it sets nothing.
fn structured_outputs(outputs: StructuredOutputsFields) -> Result<Option<GrammarSource>, ApiError> {
    let invalid = |message: String| ApiError::invalid("structured_outputs", message);
    for (name, asked) in [
        ("disable_any_whitespace", outputs.disable_any_whitespace == Some(true)),
        ("disable_additional_properties", outputs.disable_additional_properties == Some(true)),
        ("whitespace_pattern", outputs.whitespace_pattern.is_some()),
        ("structural_tag", outputs.structural_tag.is_some()),
    ] {
        if asked {
            let message = format!("structured_outputs.{name} is not implemented");
            return Err(invalid(message).with_code("unsupported_parameter"));
        }
    }
    let mut sources = Vec::new();
    sources.extend(outputs.json.map(|SchemaOrText(schema)| GrammarSource::JsonSchema(schema)));
    if outputs.json_object == Some(true) {
        sources.push(GrammarSource::JsonSchema(json!({"type": "object"})));
    }
    for (name, text, source) in [
        ("regex", outputs.regex, GrammarSource::Regex as fn(String) -> GrammarSource),
        ("grammar", outputs.grammar, GrammarSource::Lark),
    ] {
        let Some(text) = text else { continue };
        if text.len() > MAX_PATTERN {
            let message =
                format!("structured_outputs.{name} has {} bytes, at most {MAX_PATTERN} are taken", text.len());
            return Err(invalid(message));
        }
        sources.push(source(text));
    }
    if let Some(choices) = outputs.choice {
        sources.push(GrammarSource::Choice(choice(choices)?));
    }
    match sources.len() {
        0 | 1 => Ok(sources.pop()),
        _ => {
            Err(invalid("structured_outputs may hold only one of json, json_object, regex, choice and grammar".into()))
        }
    }
}

fn choice(choices: Vec<Text>) -> Result<Vec<String>, ApiError> {
    let bytes: usize = choices.iter().map(|Text(text)| text.len()).sum();
    if !(1..=MAX_CHOICES).contains(&choices.len()) || bytes > MAX_PATTERN {
        let message = format!(
            "structured_outputs.choice must be a list of 1 to {MAX_CHOICES} strings of at most {MAX_PATTERN} bytes in all"
        );
        return Err(ApiError::invalid("structured_outputs", message));
    }
    Ok(choices.into_iter().map(|Text(text)| text).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::schema::Body;
    use serde_json::Value;

    fn parse(body: Value) -> Result<Option<GrammarSource>, ApiError> {
        let text = body.to_string();
        let taken = Structured::read(Body::parse(text.as_bytes())?.read()?)?;
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
