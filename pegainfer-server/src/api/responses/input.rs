//! Translates `instructions` and `input` of `/v1/responses` into the messages of a chat.

use super::super::fields::{Fields, describe};
use crate::error::{ApiError, truncate_for_error};
use serde_json::{Value, json};

/// Parses the conversation. Calls and reasoning are items of their own here; they become part of the assistant's message.
pub fn parse(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let mut chat = Vec::new();
    if let Some(instructions) = fields.string("instructions")? {
        chat.push(json!({"role": "system", "content": instructions}));
    }
    match fields.remove("input") {
        Some(Value::String(text)) => chat.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) if !items.is_empty() => {
            for (i, item) in items.into_iter().enumerate() {
                add(i, item, &mut chat)?;
            }
        }
        Some(Value::Array(_)) => return Err(invalid("input is empty: send at least one item".into())),
        Some(other) => {
            return Err(invalid(format!("input must be a string or a list of items, got {}", describe(&other))));
        }
        None => return Err(invalid("input is missing".into())),
    }
    Ok(chat)
}

fn invalid(message: String) -> ApiError {
    ApiError::invalid("input", message)
}

fn add(i: usize, item: Value, chat: &mut Vec<Value>) -> Result<(), ApiError> {
    if !item.is_object() {
        return Err(invalid(format!("input[{i}] must be an object, got {}", describe(&item))));
    }
    match item["type"].as_str() {
        None | Some("message") => {
            let content = content(i, &item["content"])?;
            let follows = |last: &&mut Value| last["role"] == "assistant" && last.get("content").is_none();
            match chat.last_mut().filter(follows).filter(|_| item["role"] == "assistant") {
                Some(last) => last["content"] = content,
                None => chat.push(json!({"role": item["role"], "content": content})),
            }
        }
        Some("reasoning") => {
            let parts = item["content"].as_array().into_iter().flatten();
            let text: String = parts.filter_map(|part| part["text"].as_str()).collect();
            chat.push(json!({"role": "assistant", "reasoning": text}));
        }
        Some("function_call") => {
            let function = json!({"name": item["name"], "arguments": item["arguments"]});
            let call = json!({"type": "function", "id": item["call_id"], "function": function});
            match chat.last_mut().filter(|last| last["role"] == "assistant") {
                Some(last) => match last["tool_calls"].as_array_mut() {
                    Some(calls) => calls.push(call),
                    None => last["tool_calls"] = json!([call]),
                },
                None => chat.push(json!({"role": "assistant", "tool_calls": [call]})),
            }
        }
        Some("function_call_output") => {
            let output = content(i, &item["output"])?;
            chat.push(json!({"role": "tool", "tool_call_id": item["call_id"], "content": output}));
        }
        Some(other) => {
            let message = format!("input[{i}] is of type {:?}, which is not implemented", truncate_for_error(other));
            return Err(invalid(message).with_code("unsupported_parameter"));
        }
    }
    Ok(())
}

/// Content of a message: a string, or parts whose types name their author; all become text parts.
fn content(i: usize, content: &Value) -> Result<Value, ApiError> {
    let Some(parts) = content.as_array() else { return Ok(content.clone()) };
    let part = |part: &Value| match (part["type"].as_str(), &part["text"]) {
        (Some("input_text" | "output_text" | "text"), text @ Value::String(_)) => {
            Ok(json!({"type": "text", "text": text}))
        }
        (Some(kind), _) => {
            let message = format!(
                "input[{i}].content has a part of type {:?}: this model reads only text",
                truncate_for_error(kind)
            );
            Err(invalid(message).with_code("unsupported_parameter"))
        }
        (None, _) => Err(invalid(format!("input[{i}].content has a part without a type"))),
    };
    parts.iter().map(part).collect()
}
