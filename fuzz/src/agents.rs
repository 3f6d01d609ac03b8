//! Properties of `/v1/responses` and `/v1/messages`: any body gets success or a refusal in the shape of that API, never
//! a 500. A stream ends in the way of its API, and has the same text, reasoning and calls as the response that is not
//! streamed.

use crate::server::{post, read_accepted};
use serde_json::{Value, json};

/// Checks a body of `/v1/responses`.
pub fn check_responses(body: &[u8]) {
    check(
        "/v1/responses",
        body,
        &|error| error["error"]["message"].is_string(),
        summary_of_response,
        events_of_responses,
    );
}

/// Checks a body of `/v1/messages`.
pub fn check_messages(body: &[u8]) {
    let shape = |error: &Value| error["type"] == "error" && error["error"]["message"].is_string();
    check("/v1/messages", body, &shape, summary_of_message, events_of_messages);
    let (status, response) = post("/v1/messages/count_tokens", body);
    let counted = status.as_u16() == 200 && response.contains("input_tokens");
    assert!(counted || status.is_client_error(), "{}: {status} {response}", String::from_utf8_lossy(body));
}

type Summary = Vec<[String; 2]>;

fn check(
    path: &str,
    body: &[u8],
    is_error: &dyn Fn(&Value) -> bool,
    whole: fn(&Value) -> Summary,
    streamed: fn(&[Value]) -> Summary,
) {
    let (status, response) = post(path, body);
    let shown = || format!("{path} {}: {status} {response}", String::from_utf8_lossy(body));
    if status.as_u16() != 200 {
        assert!(status.is_client_error(), "{}", shown());
        let error: Value = serde_json::from_str(&response).unwrap_or_else(|e| panic!("{e}: {}", shown()));
        assert!(is_error(&error) && response.len() < 2000, "{}", shown());
        return;
    }
    let Some(mut request) = read_accepted(body, &shown) else { return };
    if request["stream"] != true {
        serde_json::from_str::<Value>(&response).unwrap_or_else(|e| panic!("{e}: {}", shown()));
        return;
    }
    let events: Vec<Value> = response.split_terminator("\n\n").filter_map(event).collect();
    let streamed = streamed(&events);
    request["stream"] = json!(false);
    let (status, plain) = post(path, request.to_string().as_bytes());
    let plain: Value = serde_json::from_str(&plain).unwrap_or_else(|e| panic!("{e}: {status} {}", shown()));
    assert_eq!(whole(&plain), streamed, "{}", shown());
}

/// The data of an event; `None` for a comment.
fn event(text: &str) -> Option<Value> {
    let (name, data) = text.strip_prefix("event: ")?.split_once("\ndata: ").expect("an event has data");
    let data: Value = serde_json::from_str(data).expect("the data is JSON");
    assert_eq!(data["type"], name, "an event carries its own name");
    Some(data)
}

fn pair(kind: &str, text: String) -> [String; 2] {
    [kind.to_string(), text]
}

fn summary_of_response(response: &Value) -> Summary {
    let text = |parts: &Value| -> String {
        parts.as_array().into_iter().flatten().filter_map(|part| part["text"].as_str()).collect()
    };
    let item = |item: &Value| match item["type"].as_str().expect("an item has a type") {
        "function_call" => pair("call", format!("{} {}", item["name"], item["arguments"])),
        kind => pair(kind, text(&item["content"])),
    };
    response["output"].as_array().expect("an output").iter().map(item).collect()
}

fn events_of_responses(events: &[Value]) -> Summary {
    let last = events.last().expect("a stream has events");
    assert!(
        ["response.completed", "response.incomplete"].contains(&last["type"].as_str().unwrap_or_default()),
        "{last}"
    );
    for (i, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], i, "{event}");
    }
    summary_of_response(&last["response"])
}

fn summary_of_message(message: &Value) -> Summary {
    let block = |block: &Value| {
        let kind = block["type"].as_str().expect("a block has a type");
        let text = match kind {
            "text" => block["text"].as_str().unwrap_or_default().to_string(),
            "thinking" => block["thinking"].as_str().unwrap_or_default().to_string(),
            _ => block["name"].to_string(),
        };
        pair(kind, text)
    };
    message["content"].as_array().expect("a content").iter().map(block).collect()
}

fn events_of_messages(events: &[Value]) -> Summary {
    assert_eq!(events.first().map(|event| &event["type"]), Some(&json!("message_start")));
    assert_eq!(events.last().map(|event| &event["type"]), Some(&json!("message_stop")));
    let mut blocks = Summary::new();
    for event in events {
        match event["type"].as_str().unwrap_or_default() {
            "content_block_start" => {
                assert_eq!(event["index"], blocks.len(), "{event}");
                blocks.extend(summary_of_message(&json!({"content": [event["content_block"]]})));
            }
            "content_block_delta" => {
                let at = event["index"].as_u64().expect("an index") as usize;
                let delta = &event["delta"];
                let text = delta["text"].as_str().or(delta["thinking"].as_str());
                blocks[at][1] += text.unwrap_or_default();
            }
            _ => {}
        }
    }
    blocks
}

const CALL: &str = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": [1, \"a\"]}}\n</tool_call>";

/// Bodies of `/v1/responses` with every kind of item.
pub fn seeds_of_responses() -> Vec<Vec<u8>> {
    let tools = json!([{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": null}]);
    [
        json!({"input": "<think>\nhm\n</think>\n\nHello", "stream": true, "max_output_tokens": 40}),
        json!({"input": CALL, "tools": tools, "stream": true, "tool_choice": "auto", "instructions": "s"}),
        json!({"input": [{"role": "developer", "content": "d"}, {"type": "message", "role": "user", "content":
            [{"type": "input_text", "text": "a"}]}, {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "4"}], "store": false, "include": [],
            "reasoning": {"effort": "low"}, "parallel_tool_calls": false, "prompt_cache_key": "k", "tools": tools}),
        json!({"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
            "temperature": 0.5, "top_p": 0.9, "stream": true, "metadata": {"a": "b"}, "truncation": "disabled"}),
    ]
    .iter()
    .map(|body| body.to_string().into_bytes())
    .collect()
}

/// Bodies of `/v1/messages` with every kind of block.
pub fn seeds_of_messages() -> Vec<Vec<u8>> {
    let tools = json!([{"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"x": {}}}}]);
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    [
        json!({"max_tokens": 40, "messages": user(json!("<think>\nhm\n</think>\n\nHello")), "stream": true,
            "thinking": {"type": "enabled", "budget_tokens": 1024}}),
        json!({"max_tokens": 60, "messages": user(json!(CALL)), "tools": tools, "stream": true,
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}}),
        json!({"max_tokens": 9, "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""},
            {"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "4", "is_error": true}]}],
            "tools": tools, "stop_sequences": ["x"], "temperature": 0.1, "top_k": 3, "metadata": {"user_id": "u"}}),
        json!({"max_tokens": 5, "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}]}),
    ]
    .iter()
    .map(|body| body.to_string().into_bytes())
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_served() {
        for (path, seeds) in [("/v1/responses", seeds_of_responses()), ("/v1/messages", seeds_of_messages())] {
            for seed in seeds {
                let (status, response) = post(path, &seed);
                assert_eq!(status.as_u16(), 200, "{path} {}: {response}", String::from_utf8_lossy(&seed));
            }
        }
    }
}
