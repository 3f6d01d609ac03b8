//! A client of `/v1/messages`: builds requests, and the message from a stream.

use crate::support::TestServer;
use crate::support::client::{post, post_ok, with};
use serde_json::{Value, json};

pub const MESSAGES: &str = "/v1/messages";

pub const CALL: &str =
    "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\"}}\n</tool_call>";

pub fn body(fields: Value) -> Value {
    with(json!({"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}), fields)
}

pub fn weather() -> Value {
    json!([{"name": "weather", "description": "Tells it.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}])
}

/// The events of a stream. Checks that each carries its own name.
pub fn stream(server: &TestServer, body: &Value) -> Vec<Value> {
    let text = post(server.address, MESSAGES, body).text();
    let event = |event: &str| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        data
    };
    text.trim_end().split("\n\n").map(event).collect()
}

/// The message that a client builds from the events.
fn assemble(events: &[Value]) -> Value {
    let mut message = events[0]["message"].clone();
    let mut partial = String::new();
    for event in &events[1..] {
        let content = message["content"].as_array_mut().unwrap();
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!(event["index"], content.len());
                content.push(event["content_block"].clone());
                partial.clear();
            }
            "content_block_delta" => {
                assert_eq!(event["index"], content.len() - 1);
                let (block, delta) = (content.last_mut().unwrap(), &event["delta"]);
                let (field, text) = match delta["type"].as_str().unwrap() {
                    "text_delta" => ("text", &delta["text"]),
                    "thinking_delta" => ("thinking", &delta["thinking"]),
                    "signature_delta" => ("signature", &delta["signature"]),
                    "input_json_delta" => {
                        partial += delta["partial_json"].as_str().unwrap();
                        continue;
                    }
                    other => panic!("{other}"),
                };
                block[field] = (block[field].as_str().unwrap().to_string() + text.as_str().unwrap()).into();
            }
            "content_block_stop" if !partial.is_empty() => {
                content.last_mut().unwrap()["input"] = serde_json::from_str(&partial).unwrap();
                partial.clear();
            }
            "content_block_stop" => {}
            "message_delta" => {
                for (name, value) in event["delta"].as_object().unwrap() {
                    message[name] = value.clone();
                }
                message["usage"] = event["usage"].clone();
            }
            "message_stop" => return message,
            other => panic!("{other}"),
        }
    }
    panic!("no message_stop in {events:?}")
}

/// The message; checks that the streamed one is the same, except for its ids.
pub fn respond(server: &TestServer, body: &Value) -> Value {
    let without_ids = |mut message: Value| {
        assert!(message["id"].as_str().unwrap().starts_with("msg_"));
        message["id"] = "id".into();
        for block in message["content"].as_array_mut().unwrap().iter_mut().filter(|block| block["type"] == "tool_use") {
            assert!(block["id"].as_str().unwrap().starts_with("call_"));
            block["id"] = "id".into();
        }
        message
    };
    let plain = without_ids(post_ok(server.address, MESSAGES, body));
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    assert_eq!(without_ids(assemble(&stream(server, &streamed))), plain);
    plain
}
