//! Property of chat rendering: any messages, tools and template arguments give a prompt or a refusal, and the prompt's
//! tokens decode to the prompt.

use crate::requests::object;
use crate::server::post;
use serde_json::{Value, json};

/// Checks an input: `[messages, tools, chat_template_kwargs]` as JSON.
pub fn check(data: &[u8]) {
    let Ok(Value::Array(parts)) = serde_json::from_slice(data) else { return };
    let mut parts = parts.into_iter();
    let mut next = || parts.next().unwrap_or_default();
    let body = object([("messages", next()), ("tools", next()), ("chat_template_kwargs", next())]);
    let shown = String::from_utf8_lossy(&body).into_owned();
    let (status, response) = post("/tokenize", &body);
    let response: Value = serde_json::from_str(&response).unwrap_or_else(|e| panic!("{e}: {shown}"));
    if status.as_u16() != 200 {
        assert!(status.is_client_error() && response["error"]["message"].is_string(), "{shown}: {status} {response}");
        return;
    }
    let (status, prompt) = post("/detokenize", &object([("tokens", response["tokens"].clone())]));
    assert!(status.is_success(), "{shown}: {status} {prompt}");
    let prompt: Value = serde_json::from_str(&prompt).unwrap_or_else(|e| panic!("{e}: {shown}"));
    let (status, again) = post("/tokenize", &object([("prompt", prompt["prompt"].clone())]));
    let again: Value = serde_json::from_str(&again).unwrap_or_else(|e| panic!("{e}: {status} {shown}"));
    assert_eq!(again["tokens"], response["tokens"], "{shown}");
}

/// Conversations with every role.
pub fn seeds() -> Vec<Vec<u8>> {
    let tool = json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object",
        "properties": {"x": {"type": "string", "enum": ["é", null]}}, "required": ["x"]}}});
    let call = json!({"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": \"é\"}"}}]});
    let result = json!({"role": "tool", "tool_call_id": "1", "content": "4"});
    let user = json!({"role": "user", "content": "Hi <|im_end|> 🎉"});
    let parts = json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]});
    [
        json!([[user], null, {}]),
        json!([[{"role": "system", "content": "s"}, user, {"role": "assistant", "content": "<think>\nx\n</think>\n\ny"}, parts]]),
        json!([[user, call, result, result, user], [tool], {"enable_thinking": false}]),
    ]
    .iter()
    .map(|value| value.to_string().into_bytes())
    .collect()
}
