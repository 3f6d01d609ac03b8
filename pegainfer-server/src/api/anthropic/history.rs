//! `system` and `messages` of `/v1/messages` as the messages of a chat.

use super::super::fields::{Fields, describe};
use crate::error::{ApiError, truncate_for_error};
use serde_json::{Value, json};

/// Parses the conversation so far.
pub fn parse(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let mut chat = Vec::new();
    match fields.remove("system") {
        None => {}
        Some(Value::String(text)) => chat.push(json!({"role": "system", "content": text})),
        Some(Value::Array(parts)) => chat.push(json!({"role": "system", "content": parts})),
        Some(other) => {
            let message = format!("system must be a string or a list of text blocks, got {}", describe(&other));
            return Err(ApiError::invalid("system", message));
        }
    }
    let Some(messages) = fields.list("messages")? else { return Err(invalid("messages is missing".into())) };
    if messages.is_empty() {
        return Err(invalid("messages is empty: send at least one message".into()));
    }
    for (i, message) in messages.iter().enumerate() {
        match (message["role"].as_str(), &message["content"]) {
            (Some(role @ ("user" | "assistant")), content @ Value::String(_)) => {
                chat.push(json!({"role": role, "content": content}));
            }
            (Some("user"), Value::Array(blocks)) => user(i, blocks, &mut chat)?,
            (Some("assistant"), Value::Array(blocks)) => assistant(i, blocks, &mut chat)?,
            (Some("user" | "assistant"), other) => {
                let got = describe(other);
                return Err(invalid(format!("messages[{i}].content must be a string or a list of blocks, got {got}")));
            }
            _ => return Err(invalid(format!("messages[{i}].role must be user or assistant"))),
        }
    }
    Ok(chat)
}

fn invalid(message: String) -> ApiError {
    ApiError::invalid("messages", message)
}

fn unknown(i: usize, block: &Value) -> ApiError {
    match block["type"].as_str() {
        Some(kind) => {
            let message = format!(
                "messages[{i}].content has a block of type {:?}, which this model cannot read here",
                truncate_for_error(kind)
            );
            invalid(message).with_code("unsupported_parameter")
        }
        None => invalid(format!("messages[{i}].content has a block without a type")),
    }
}

fn text(i: usize, block: &Value) -> Result<Value, ApiError> {
    match &block["text"] {
        text @ Value::String(_) => Ok(json!({"type": "text", "text": text})),
        _ => Err(invalid(format!("messages[{i}].content has a text block whose text is not a string"))),
    }
}

/// User message: each tool result becomes a message of its own, the text parts become one message.
fn user(i: usize, blocks: &[Value], chat: &mut Vec<Value>) -> Result<(), ApiError> {
    let mut parts = Vec::new();
    for block in blocks {
        match block["type"].as_str() {
            Some("text") => parts.push(text(i, block)?),
            Some("tool_result") => {
                let Some(id) = block["tool_use_id"].as_str() else {
                    return Err(invalid(format!("messages[{i}].content has a tool_result without tool_use_id")));
                };
                let content =
                    if block["is_error"] == true { failed(&block["content"]) } else { block["content"].clone() };
                chat.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
            }
            _ => return Err(unknown(i, block)),
        }
    }
    if !parts.is_empty() {
        chat.push(json!({"role": "user", "content": parts}));
    }
    Ok(())
}

/// Content of a failed tool call. Chat templates have no field for the failure, so the text says it.
fn failed(content: &Value) -> Value {
    match content {
        Value::String(text) => format!("Error: {text}").into(),
        Value::Array(blocks) => [&[json!({"type": "text", "text": "Error: "})], blocks.as_slice()].concat().into(),
        _ => "Error".into(),
    }
}

fn assistant(i: usize, blocks: &[Value], chat: &mut Vec<Value>) -> Result<(), ApiError> {
    let (mut parts, mut calls, mut reasoning) = (Vec::new(), Vec::new(), String::new());
    for block in blocks {
        match block["type"].as_str() {
            Some("text") => parts.push(text(i, block)?),
            Some("thinking") => reasoning += block["thinking"].as_str().unwrap_or_default(),
            Some("tool_use") => {
                let function = json!({"name": block["name"], "arguments": block["input"]});
                calls.push(json!({"type": "function", "id": block["id"], "function": function}));
            }
            _ => return Err(unknown(i, block)),
        }
    }
    let mut message = json!({"role": "assistant", "content": parts});
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    if !reasoning.is_empty() {
        message["reasoning"] = reasoning.into();
    }
    chat.push(message);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_call_is_marked_in_its_text() {
        let result =
            |content: Value| json!({"type": "tool_result", "tool_use_id": "t", "is_error": true, "content": content});
        let mut chat = Vec::new();
        let blocks =
            [result(json!("no such city")), result(json!([{"type": "text", "text": "gone"}])), result(Value::Null)];
        user(0, &blocks, &mut chat).unwrap();
        assert_eq!(chat[0]["content"], "Error: no such city");
        assert_eq!(chat[1]["content"], json!([{"type": "text", "text": "Error: "}, {"type": "text", "text": "gone"}]));
        assert_eq!(chat[2]["content"], "Error");
    }
}
