//! Translates a body of `/v1/responses` into a chat request. Fields that both APIs share are passed through.

use super::super::fields::{Fields, describe};
use super::input;
use crate::error::{ApiError, truncate_for_error};
use serde_json::{Map, Value, json};

/// Chat-completion fields that `/v1/responses` expresses differently or does not have.
const CHAT_ONLY: [&str; 17] = [
    "best_of",
    "functions",
    "function_call",
    "include_metrics",
    "include_reasoning",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "n",
    "prompt_logprobs",
    "reasoning_effort",
    "response_format",
    "return_token_ids",
    "stop",
    "truncate_prompt_tokens",
    "verbosity",
];
/// Fields that need stored responses or server-side tools. Only the value that switches them off is accepted.
const UNIMPLEMENTED: [(&str, Value); 12] = [
    ("access_programs", Value::Null),
    ("background", Value::Bool(false)),
    ("background_options", Value::Null),
    ("context_management", Value::Null),
    ("conversation", Value::Null),
    ("image", Value::Null),
    ("include", Value::Array(Vec::new())),
    ("max_tool_calls", Value::Null),
    ("moderation", Value::Null),
    ("previous_response_id", Value::Null),
    ("prompt", Value::Null),
    ("store", Value::Bool(false)),
];
/// Pairs of a chat-completion field and this API's name for it, for error messages.
const NAMES: [(&str, &str); 4] = [
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format", "text"),
    ("reasoning_effort", "reasoning"),
];
/// Request fields that a response repeats, and their values if the request leaves them out.
const ECHOED: [(&str, Value); 10] = [
    ("instructions", Value::Null),
    ("max_output_tokens", Value::Null),
    ("metadata", Value::Null),
    ("parallel_tool_calls", Value::Bool(true)),
    ("reasoning", Value::Null),
    ("temperature", Value::Null),
    ("text", Value::Null),
    ("tool_choice", Value::Null),
    ("tools", Value::Array(Vec::new())),
    ("top_p", Value::Null),
];

/// Rewrites an error about a chat-completion field in this API's field names.
pub fn rename(error: ApiError) -> ApiError {
    NAMES.iter().fold(error, |error, (from, to)| error.renamed(from, to))
}

/// Translates a body; also returns the fields that the response repeats.
pub fn chat(fields: Fields) -> Result<(Fields, Map<String, Value>), ApiError> {
    let body = fields.rest();
    let value = |(name, default): &(&str, Value)| (name.to_string(), body.get(*name).unwrap_or(default).clone());
    let mut echoed: Map<String, Value> = ECHOED.iter().map(value).collect();
    for (name, default) in
        [("metadata", json!({})), ("text", json!({"format": {"type": "text"}})), ("tool_choice", json!("auto"))]
    {
        echoed.entry(name).and_modify(|value| *value = if value.is_null() { default } else { value.take() });
    }
    Ok((translate(Fields::new(body))?, echoed))
}

fn translate(mut fields: Fields) -> Result<Fields, ApiError> {
    let unsupported = |name: &str| {
        let message = format!("{name} is not implemented by this endpoint");
        Err(ApiError::invalid(name, message).with_code("unsupported_parameter"))
    };
    if let Some(name) = CHAT_ONLY.iter().find(|name| fields.has(name)) {
        return unsupported(name);
    }
    for (name, no) in UNIMPLEMENTED {
        if fields.remove(name).is_some_and(|value| value != no) {
            return unsupported(name);
        }
    }
    if fields.string("truncation")?.is_some_and(|how| how != "disabled") {
        return unsupported("truncation");
    }
    if fields.integer("top_logprobs", 0..=i64::MAX)?.is_some_and(|n| n > 0) {
        return unsupported("top_logprobs");
    }
    let mut chat = Map::new();
    chat.insert("messages".into(), input::parse(&mut fields)?.into());
    if let Some(tools) = fields.list("tools")? {
        let tools: Vec<Value> = tools.into_iter().enumerate().map(tool).collect::<Result<_, _>>()?;
        chat.insert("tools".into(), tools.into());
    }
    match fields.remove("tool_choice") {
        Some(Value::Object(choice)) => {
            let name = choice.get("name").cloned().unwrap_or_default();
            let kind = choice.get("type").cloned().unwrap_or_default();
            chat.insert("tool_choice".into(), json!({"type": kind, "function": {"name": name}}));
        }
        other => chat.extend(other.map(|choice| ("tool_choice".to_string(), choice))),
    }
    if let Some(max) = fields.remove("max_output_tokens") {
        chat.insert("max_completion_tokens".into(), max);
    }
    if let Some(text) = fields.object("text")? {
        chat.extend(text_format(text)?.map(|format| ("response_format".to_string(), format)));
    }
    if let Some(reasoning) = fields.object("reasoning")? {
        reason(reasoning, &mut chat)?;
    }
    chat.extend(fields.rest());
    Ok(Fields::new(chat))
}

/// Translates a function, which has no `function` object around it. Tools that a vendor runs itself have another type.
fn tool((i, tool): (usize, Value)) -> Result<Value, ApiError> {
    match tool {
        Value::Object(mut tool) => {
            let kind = tool.remove("type").unwrap_or_default();
            tool.retain(|_, value| !value.is_null());
            Ok(json!({"type": kind, "function": tool}))
        }
        other => Err(ApiError::invalid("tools", format!("tools[{i}] must be an object, got {}", describe(&other)))),
    }
}

/// Translates `text`: its `format` is `response_format` without the `json_schema` around the schema.
fn text_format(text: Map<String, Value>) -> Result<Option<Value>, ApiError> {
    let mut text = Fields::new(text);
    let format = text.object("format").map_err(|error| error.with_param("text"))?;
    if let Some(name) = text.rest().iter().find(|(_, value)| **value != "medium").map(|(name, _)| name) {
        let message = format!("text.{} is not implemented", truncate_for_error(name));
        return Err(ApiError::invalid("text", message).with_code("unsupported_parameter"));
    }
    Ok(format.map(|mut format| {
        let kind = format.remove("type").unwrap_or_default();
        if kind == "json_schema" { json!({"type": kind, "json_schema": format}) } else { json!({"type": kind}) }
    }))
}

/// Translates `reasoning`: its `effort` is `reasoning_effort`.
fn reason(reasoning: Map<String, Value>, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let mut reasoning = Fields::new(reasoning);
    chat.extend(reasoning.remove("effort").map(|effort| ("reasoning_effort".to_string(), effort)));
    match reasoning.rest().keys().next() {
        Some(name) => {
            let message = format!("reasoning.{} is not implemented", truncate_for_error(name));
            Err(ApiError::invalid("reasoning", message).with_code("unsupported_parameter"))
        }
        None => Ok(()),
    }
}
