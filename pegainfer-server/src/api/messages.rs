//! The messages of a chat request, checked and normalised for chat templates.

use super::fields::{Fields, describe};
use crate::error::{ApiError, truncate_for_error};
use serde_json::{Map, Value};

/// Parses the messages: each has a role that templates know, and a string as content.
pub fn parse(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let Some(messages) = fields.list("messages")? else { return Err(invalid("messages is missing")) };
    if messages.is_empty() {
        return Err(invalid("messages is empty: send at least one message"));
    }
    messages.into_iter().enumerate().map(|(i, message)| normalise(i, message)).collect()
}

fn invalid(message: impl Into<String>) -> ApiError {
    ApiError::invalid("messages", message)
}

fn normalise(i: usize, message: Value) -> Result<Value, ApiError> {
    let Value::Object(mut message) = message else {
        return Err(invalid(format!("messages[{i}] must be an object, got {}", describe(&message))));
    };
    message.retain(|_, value| !value.is_null());
    let role = match message.get("role").and_then(Value::as_str) {
        // OpenAI's newer name for what templates call system.
        Some("developer") => "system".to_string(),
        Some(role @ ("system" | "user" | "assistant" | "tool")) => role.to_string(),
        Some(role) => {
            let known = "system, developer, user, assistant and tool";
            return Err(invalid(format!(
                "messages[{i}].role {:?} is unknown: there are {known}",
                truncate_for_error(role)
            )));
        }
        None => return Err(invalid(format!("messages[{i}].role is missing or not a string"))),
    };
    let content = content_text(i, message.get("content"))?;
    message.insert("role".into(), role.into());
    message.insert("content".into(), content.into());
    // Templates know the reasoning of earlier turns under the older of its two names.
    if let Some(reasoning) = message.shift_remove("reasoning") {
        message.entry("reasoning_content").or_insert(reasoning);
    }
    if let Some(calls) = message.get_mut("tool_calls") {
        tool_calls(i, calls)?;
    }
    Ok(Value::Object(message))
}

/// Text of a `content`: a string, a list of text parts (joined by line breaks, as vLLM does), or nothing.
fn content_text(i: usize, content: Option<&Value>) -> Result<String, ApiError> {
    match content {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let texts: Vec<&str> = parts.iter().map(|part| part_text(i, part)).collect::<Result<_, _>>()?;
            Ok(texts.join("\n"))
        }
        Some(other) => {
            let got = describe(other);
            Err(invalid(format!("messages[{i}].content must be a string or a list of text parts, got {got}")))
        }
    }
}

fn part_text(i: usize, part: &Value) -> Result<&str, ApiError> {
    if let Value::String(text) = part {
        return Ok(text);
    }
    match part["type"].as_str() {
        Some("text") => part["text"]
            .as_str()
            .ok_or_else(|| invalid(format!("messages[{i}].content has a text part whose text is not a string"))),
        Some(other) => {
            let message = format!(
                "messages[{i}].content has a part of type {:?}: this model reads only text",
                truncate_for_error(other)
            );
            Err(invalid(message).with_code("unsupported_parameter"))
        }
        None => Err(invalid(format!("messages[{i}].content has a part without a type"))),
    }
}

/// Parses the arguments of earlier tool calls: OpenAI sends a string of JSON, templates expect the object.
fn tool_calls(i: usize, calls: &mut Value) -> Result<(), ApiError> {
    let Value::Array(calls) = calls else { return Err(invalid(format!("messages[{i}].tool_calls must be a list"))) };
    for call in calls {
        let function = call.get_mut("function").and_then(Value::as_object_mut);
        let Some(function) = function.filter(|f| f.get("name").is_some_and(Value::is_string)) else {
            return Err(invalid(format!("messages[{i}].tool_calls has an entry without a function name")));
        };
        let arguments = match function.get("arguments") {
            None => Value::Object(Map::new()),
            Some(Value::String(text)) if text.is_empty() => Value::Object(Map::new()),
            Some(Value::String(text)) => serde_json::from_str(text)
                .map_err(|e| invalid(format!("messages[{i}].tool_calls has arguments that are not valid JSON: {e}")))?,
            Some(other) => other.clone(),
        };
        function.insert("arguments".into(), arguments);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn messages(value: Value) -> Result<Vec<Value>, ApiError> {
        parse(&mut Fields::new(json!({ "messages": value }).as_object().unwrap().clone()))
    }

    #[test]
    fn content_becomes_a_string() {
        let parts = json!([
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": 2}"}}]},
            {"role": "assistant", "reasoning": "hm"}]);
        let expected = json!([
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": 2}}}], "content": ""},
            {"role": "assistant", "content": "", "reasoning_content": "hm"}]);
        assert_eq!(Value::from(messages(parts).unwrap()), expected);
    }

    #[test]
    fn errors_name_the_bad_message_by_its_index() {
        for (bad, expected) in [
            (json!([]), "messages is empty"),
            (json!("hi"), "messages must be a list"),
            (json!([{"role": "user"}, 5]), "messages[1] must be an object"),
            (json!([{"content": "x"}]), "messages[0].role is missing"),
            (json!([{"role": "robot", "content": "x"}]), "messages[0].role \\\"robot\\\" is unknown"),
            (json!([{"role": "user", "content": 5}]), "messages[0].content must be a string"),
            (json!([{"role": "user", "content": [{"type": "image_url"}]}]), "this model reads only text"),
            (json!([{"role": "user", "content": [{"text": "x"}]}]), "part without a type"),
            (json!([{"role": "assistant", "tool_calls": [{}]}]), "without a function name"),
            (
                json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]),
                "not valid JSON",
            ),
        ] {
            let body = messages(bad).unwrap_err().body();
            assert!(body.contains(expected), "{body} should contain {expected}");
        }
    }
}
