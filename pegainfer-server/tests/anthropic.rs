//! `/v1/messages` over HTTP, with a scripted engine that replays model outputs.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use pegainfer_server::app::Options;
use pegainfer_server::http::{ApiKeys, Secret};
use serde_json::{Value, json};
use support::client::{get, post, post_ok, post_with, send, with, write};
use support::mock::MockEngine;
use support::{TestServer, wait_until};

const MESSAGES: &str = "/v1/messages";
const CALL: &str = "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\"}}\n</tool_call>";

fn body(fields: Value) -> Value {
    with(json!({"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}), fields)
}

fn weather() -> Value {
    json!([{"name": "weather", "description": "Tells it.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}])
}

/// The events of a stream, each checked to carry its own name.
fn stream(server: &TestServer, body: &Value) -> Vec<Value> {
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
fn respond(server: &TestServer, body: &Value) -> Value {
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

#[test]
fn a_message_has_the_shape_of_anthropic() {
    let (server, control) = TestServer::replying(" a cat");
    let system = json!([{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]);
    let content = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let body = body(json!({"system": system, "messages": [{"role": "user", "content": content}], "metadata": {},
        "temperature": 0.5, "top_k": 7}));
    let message = respond(&server, &body);
    let count = control.last().prompt.len();
    let usage = json!({"input_tokens": count - count / 2, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": count / 2, "output_tokens": 3});
    let expected = json!({"id": "id", "type": "message", "role": "assistant", "model": "tiny",
        "content": [{"type": "text", "text": " a cat"}], "stop_reason": "end_turn", "stop_sequence": null, "usage": usage});
    assert_eq!(message, expected);
    assert_eq!(control.last().sampling.top_k(), 7);
    let prompt = control.prompt_text();
    assert!(prompt.contains("system\nBe kind.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>"), "{prompt}");
    let counted = post_ok(server.address, "/v1/messages/count_tokens", &body);
    assert_eq!(counted, json!({"input_tokens": count}));
}

#[test]
fn a_stream_has_the_events_in_their_order() {
    let (server, _) = TestServer::replying(CALL);
    let events = stream(&server, &body(json!({"stream": true, "tools": weather()})));
    let mut names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    names.dedup();
    let block = ["content_block_start", "content_block_delta", "content_block_stop"];
    let expected = [&["message_start"][..], &block, &block, &["message_delta", "message_stop"]].concat();
    assert_eq!(names, expected);
    assert_eq!(events[0]["message"]["content"], json!([]));
    assert!(events[0]["message"]["usage"]["input_tokens"].as_u64().unwrap() > 0);
}

#[test]
fn tools_and_their_results() {
    let (server, control) = TestServer::replying(CALL);
    let message = respond(&server, &body(json!({"tools": weather()})));
    let call = json!({"type": "tool_use", "id": "id", "name": "weather", "input": {"city": "Bern"}});
    assert_eq!(message["content"], json!([{"type": "text", "text": "I look."}, call]));
    assert_eq!(message["stop_reason"], "tool_use");
    assert!(
        control
            .prompt_text()
            .contains("{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"description\": \"Tells it.\"")
    );
    let result = json!([{"type": "tool_result", "tool_use_id": "id", "content": [{"type": "text", "text": "sunny"}]},
        {"type": "text", "text": "And now?"}]);
    let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": result}]);
    respond(&server, &body(json!({"tools": weather(), "messages": messages})));
    let history = format!(
        "assistant\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\
        <|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>"
    );
    assert!(control.prompt_text().contains(&history), "{}", control.prompt_text());

    let none = respond(&server, &body(json!({"tools": weather(), "tool_choice": {"type": "none"}})));
    assert_eq!(none["content"], json!([{"type": "text", "text": CALL}]));
    post_ok(
        server.address,
        MESSAGES,
        &body(json!({"tools": weather(), "tool_choice": {"type": "tool", "name": "weather"}})),
    );
    assert!(control.prompt_text().ends_with("{\"name\": \"weather\", \"arguments\":"));
    assert!(control.last().grammar.is_some());
}

#[test]
fn reasoning_and_the_ways_to_stop() {
    let (server, control) = TestServer::replying("<think>\nHm.\n</think>\n\nParis it is.");
    let message = respond(&server, &body(json!({"thinking": {"type": "adaptive"}})));
    let blocks =
        json!([{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Paris it is."}]);
    assert_eq!(message["content"], blocks);
    assert!(control.prompt_text().ends_with("<|im_start|>assistant\n"), "{}", control.prompt_text());
    assert!(control.last().grammar.is_none());
    respond(&server, &body(json!({"thinking": {"type": "enabled", "budget_tokens": 1024}})));
    assert!(control.last().grammar.is_some(), "which counts the tokens");
    respond(&server, &body(json!({"output_config": {"effort": "low"}})));
    assert!(control.prompt_text().ends_with("<|im_start|>assistant\n"), "{}", control.prompt_text());
    respond(&server, &body(json!({"output_config": {"effort": "max"}, "thinking": {"type": "disabled"}})));
    assert!(control.prompt_text().ends_with("</think>\n\n"), "{}", control.prompt_text());
    let history = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": blocks},
        {"role": "user", "content": "go on"}]);
    respond(&server, &body(json!({"messages": history})));
    let stopped = respond(&server, &body(json!({"stop_sequences": [" it"], "thinking": {"type": "adaptive"}})));
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!(" it")));
    let short = respond(&server, &body(json!({"max_tokens": 5, "thinking": {"type": "adaptive"}})));
    assert_eq!(short["stop_reason"], "max_tokens");
    let format = json!({"format": {"type": "json_schema", "schema": {"type": "object"}}});
    post_ok(server.address, MESSAGES, &body(json!({"output_config": format})));
    assert!(control.last().grammar.is_some());
}

#[test]
fn errors_have_the_shape_of_anthropic() {
    let (server, control) = TestServer::replying("x");
    for (fields, status, kind, expected) in [
        (json!({"max_tokens": null}), 400, "invalid_request_error", "max_tokens is missing"),
        (json!({"model": "gpt"}), 404, "not_found_error", "does not exist"),
        (json!({"messages": []}), 400, "invalid_request_error", "messages is empty"),
        (json!({"messages": [{"role": "system", "content": "x"}]}), 400, "invalid_request_error", "user or assistant"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
            400,
            "invalid_request_error",
            "type \"image\"",
        ),
        (json!({"stop_sequences": [""]}), 400, "invalid_request_error", "stop_sequences must not hold an empty"),
        (json!({"n": 2}), 400, "invalid_request_error", "n is not implemented"),
        (json!({"mcp_servers": []}), 400, "invalid_request_error", "mcp_servers is not implemented"),
        (
            json!({"thinking": {"type": "enabled", "budget_tokens": -5}}),
            400,
            "invalid_request_error",
            "budget_tokens must be",
        ),
        (
            json!({"thinking": {"type": "adaptive", "budget_tokens": 5}}),
            400,
            "invalid_request_error",
            "budget_tokens needs",
        ),
        (json!({"tools": [{"type": "web_search_20250305", "name": "x"}]}), 400, "invalid_request_error", "only custom"),
        (json!({"tools": [{"name": "x"}]}), 400, "invalid_request_error", "input_schema is missing"),
        (json!({"tool_choice": {"type": "must"}}), 400, "invalid_request_error", "tool_choice.type"),
        (
            json!({"output_config": {"effort": "most"}}),
            400,
            "invalid_request_error",
            "output_config must be one of none",
        ),
        (json!({"temperature": "hot"}), 400, "invalid_request_error", "temperature must be a number"),
    ] {
        let response = post(server.address, MESSAGES, &body(fields.clone()));
        let (got, error) = (response.status, response.json());
        assert_eq!((got, &error["type"], &error["error"]["type"]), (status, &json!("error"), &json!(kind)), "{error}");
        assert!(error["error"]["message"].as_str().unwrap().contains(expected), "{error}");
    }
    assert_eq!(control.added(), 0);
    control.allow(2);
    control.fail.store(true, std::sync::atomic::Ordering::SeqCst);
    let (server, control) = TestServer::replying("one two three");
    control.allow(2);
    control.fail.store(true, std::sync::atomic::Ordering::SeqCst);
    let events = stream(&server, &body(json!({"stream": true})));
    let error = events.last().unwrap();
    assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("api_error")), "{error}");
}

#[test]
fn a_key_may_come_in_anthropics_header() {
    let keys = ApiKeys::load(&[Secret("k1".into())], None).unwrap();
    let server = TestServer::with(MockEngine::replying("x").0, Options { api_keys: keys, ..Options::default() });
    let status = |key: &str| post_with(server.address, MESSAGES, ("x-api-key", key), &body(json!({}))).status;
    assert_eq!((status("k1"), status("k2")), (200, 401));
}

#[test]
fn every_refusal_has_the_shape_of_the_api_that_was_called() {
    let (engine, control) = MockEngine::replying(" a cat");
    control.allow(0);
    let keys = ApiKeys::load(&[Secret("k".into())], None).unwrap();
    let mut server = TestServer::with(engine, Options { api_keys: keys, max_body: 1000, ..Options::default() });
    let address = server.address;
    let ask = |path: &str, method: &str, headers: &[(&str, &str)], body: &str| {
        let response = send(address, method, path, headers, body.as_bytes());
        let (status, id) = (response.status, response.header("request-id").map(str::to_string));
        (status, id, response.json())
    };
    let (key, json_type, text_type) =
        (("x-api-key", "k"), ("Content-Type", "application/json"), ("Content-Type", "text/plain"));
    let large = format!("{{\"x\": \"{}\"}}", "x".repeat(1000));
    for (path, method, headers, body, status, kind) in [
        (MESSAGES, "POST", vec![json_type], "{}", 401, "authentication_error"),
        (MESSAGES, "POST", vec![json_type, key], "{}", 400, "invalid_request_error"),
        (MESSAGES, "GET", vec![key], "", 405, "invalid_request_error"),
        ("/v1/messages/batches", "POST", vec![json_type, key], "{}", 404, "not_found_error"),
        (MESSAGES, "POST", vec![text_type, key], "{}", 415, "invalid_request_error"),
        (MESSAGES, "POST", vec![json_type, key], &large, 413, "request_too_large"),
        ("/v1/messages/count_tokens", "POST", vec![json_type, key], "[]", 400, "invalid_request_error"),
    ] {
        let (got, id, error) = ask(path, method, &headers, body);
        assert_eq!((got, &error["type"], &error["error"]["type"]), (status, &json!("error"), &json!(kind)), "{error}");
        assert!(error["error"]["message"].is_string() && id.is_some() && error["request_id"] == json!(id), "{error}");
        let openai = if path == MESSAGES { "/v1/chat/completions" } else { "/v1/nothing" };
        let (_, id, error) = ask(openai, method, &headers, body);
        assert!(id.is_none() && error["error"]["message"].is_string() && error.get("type").is_none(), "{error}");
    }
    let open = write(server.address, "POST", MESSAGES, &[json_type, key], body(json!({})).to_string().as_bytes());
    wait_until("a request is open", || control.added() == 1);
    server.stop();
    wait_until("it drains", || get(server.address, "/health").status == 503);
    let (status, _, error) = ask(MESSAGES, "POST", &[json_type, key], "{}");
    assert_eq!((status, &error["error"]["type"]), (503, &json!("overloaded_error")));
    drop(open);
}
