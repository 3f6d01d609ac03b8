//! `/v1/messages` over HTTP, with a scripted engine that replays model outputs.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use pegainfer_server::app::Options;
use pegainfer_server::http::{ApiKeys, Secret};
use serde_json::{Value, json};
use support::client::{get, post, post_ok, post_with, send, with, write};
use support::mock::{Control, MockEngine};
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
    respond(&server, &body(json!({"output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}})));
    assert!(control.prompt_text().ends_with("<|im_start|>assistant\n"), "{}", control.prompt_text());
    // As in Anthropic's API, there is no reasoning unless it is asked for.
    for fields in [json!({}), json!({"output_config": {"effort": "low"}})] {
        respond(&server, &body(fields));
        assert!(control.prompt_text().ends_with("</think>\n\n"), "{}", control.prompt_text());
    }
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
        (
            json!({"messages": [{"role": "tool", "content": "x"}]}),
            400,
            "invalid_request_error",
            "messages[0].role must be one of user, assistant, system",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
            400,
            "invalid_request_error",
            "messages[0].content[0] is of type image: this model reads only text (capability_rejected: image_block)",
        ),
        (
            json!({"messages": [{"role": "user", "content": 5}]}),
            400,
            "invalid_request_error",
            "messages[0].content must",
        ),
        (json!({"stop_sequences": [""]}), 400, "invalid_request_error", "stop_sequences must not hold an empty"),
        (json!({"mcp_servers": [{}]}), 400, "invalid_request_error", "mcp_servers is not implemented"),
        (json!({"container": "c"}), 400, "invalid_request_error", "container is not implemented"),
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
        (json!({"tools": [{"type": "bash_20250124", "name": "x"}]}), 400, "invalid_request_error", "only custom"),
        (json!({"tools": [{"name": "x"}]}), 400, "invalid_request_error", "input_schema is missing"),
        (json!({"tool_choice": {"type": "must"}}), 400, "invalid_request_error", "tool_choice.type"),
        (
            json!({"output_config": {"effort": "most"}}),
            400,
            "invalid_request_error",
            "output_config.effort must be one of none",
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

/// The prompt of a request, and the fields that it reports as ignored.
fn prompt(server: &TestServer, control: &Control, fields: Value) -> (String, String) {
    let response = post(server.address, MESSAGES, &body(fields.clone()));
    let (status, ignored) = (response.status, response.header("x-ignored-fields").unwrap_or_default().to_string());
    assert_eq!(status, 200, "{fields}: {}", response.text());
    (control.prompt_text(), ignored)
}

#[test]
fn instructions_within_a_conversation_join_the_user_s_turn() {
    let (server, control) = TestServer::replying("ok");
    let text = |text: &str| json!([{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]);
    let messages = json!([{"role": "user", "content": "a"}, {"role": "system", "content": text("b")},
        {"role": "assistant", "content": "c"}, {"role": "system", "content": "d"}, {"role": "user", "content": "e"}]);
    let edits = json!({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]});
    let (shown, ignored) = prompt(&server, &control, json!({"messages": messages, "context_management": edits}));
    let turns = "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n";
    assert!(shown.contains(turns), "{shown}");
    assert_eq!(ignored, "context_management");
    let nothing = json!({"context_management": {"edits": []}, "mcp_servers": []});
    assert_eq!(prompt(&server, &control, nothing).1, "");
}

#[test]
fn a_last_message_of_the_assistant_is_continued() {
    let (server, control) = TestServer::replying(" Bern");
    let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "The capital is"}]);
    let message = respond(&server, &body(json!({ "messages": messages })));
    assert_eq!(message["content"], json!([{"type": "text", "text": " Bern"}]));
    assert!(control.prompt_text().ends_with("<|im_start|>assistant\nThe capital is"), "{}", control.prompt_text());
}

#[test]
fn results_that_are_no_text_are_replaced_by_a_note() {
    let (server, control) = TestServer::replying("ok");
    let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}});
    let paper =
        json!({"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}});
    let found = json!({"type": "search_result", "title": "S", "source": "http://s", "content": [{"type": "text", "text": "F"}]});
    let content = json!([{"type": "text", "text": "x"}, image, paper, found]);
    let messages = json!([{"role": "user", "content": [{"type": "text", "text": "hi"}, paper]},
        {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "e"}, {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Bern"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": content}]}]);
    let (shown, ignored) = prompt(&server, &control, json!({"messages": messages, "tools": weather()}));
    let result =
        "<tool_response>\nx\n[image left out: this model reads only text]\nT\nD\nS\nhttp://s\nF\n</tool_response>";
    assert!(shown.contains(result) && shown.contains("user\nhi\nT\nD<|im_end|>"), "{shown}");
    let parts = ["redacted_thinking", "server_tool_use", "web_search_tool_result", "content[].image"];
    assert_eq!(ignored, parts.map(|part| format!("messages[].content[].{part}")).join(", "));
}

#[test]
fn deferred_tools_are_shown_where_they_are_referred_to() {
    let (server, control) = TestServer::replying(CALL);
    let mut tools = weather();
    tools[0]["defer_loading"] = true.into();
    let more = [
        json!({"name": "search", "input_schema": {"type": "object"}}),
        json!({"type": "web_search_20250305", "name": "web_search", "max_uses": 8}),
    ];
    tools.as_array_mut().unwrap().extend(more);
    let first = json!([{"role": "user", "content": "hi"}]);
    let (before, ignored) = prompt(&server, &control, json!({"messages": first, "tools": tools}));
    assert!(before.contains("\"name\": \"search\"") && !before.contains("weather"), "{before}");
    assert_eq!(ignored, "tools[].web_search_20250305");
    let messages = json!([{"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "search", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t",
            "content": [{"type": "tool_reference", "tool_name": "weather"}]}]}]);
    let fields = json!({"messages": messages, "tools": tools});
    let message = respond(&server, &body(fields));
    assert_eq!(message["content"][1]["name"], "weather");
    let after = control.prompt_text();
    assert!(
        after.starts_with(before.strip_suffix("<|im_start|>assistant\n<think>\n\n</think>\n\n").unwrap()),
        "{after}"
    );
    assert!(
        after.contains("<tool_response>\n{\"type\": \"function\", \"function\": {\"name\": \"weather\""),
        "{after}"
    );
}

#[test]
fn a_call_that_was_cut_off_is_an_object_and_may_come_back() {
    let cut = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\", \"days\": \"thr";
    let (server, control) = TestServer::replying(cut);
    let tokens = support::tokenizer().encode(cut, false).unwrap().len();
    let message = post_ok(server.address, MESSAGES, &body(json!({"tools": weather(), "max_tokens": tokens})));
    assert_eq!(
        (&message["stop_reason"], &message["content"][0]["input"]),
        (&json!("max_tokens"), &json!({"city": "Bern"}))
    );
    let call = json!({"type": "tool_use", "id": "t", "name": "weather", "input": "{\"city\": \"Be"});
    let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "cut off"}]}]);
    let (shown, _) = prompt(&server, &control, json!({"messages": messages, "tools": weather()}));
    assert!(shown.contains("{\"name\": \"weather\", \"arguments\": {\"city\": \"Be}\n</tool_call>"), "{shown}");
}

#[test]
fn only_claude_code_loses_its_billing_block() {
    let (engine, control) = MockEngine::replying("ok");
    let server = TestServer::start(engine, support::Setup::default());
    let billing = "x-anthropic-billing-header: cc_version=2.1.330.f8c; cc_entrypoint=sdk-cli;";
    let system = json!([{"type": "text", "text": billing}, {"type": "text", "text": "Be kind."}]);
    let body = body(json!({ "system": system }));
    for (agent, kept) in [("claude-cli/2.1.330 (external, sdk-cli)", false), ("another/1.0", true)] {
        assert_eq!(post_with(server.address, MESSAGES, ("User-Agent", agent), &body).status, 200);
        let prompt = control.prompt_text();
        assert_eq!((prompt.contains(billing), prompt.contains("Be kind.")), (kept, true), "{prompt}");
    }
}

#[test]
fn models_have_the_shape_of_the_api_that_the_client_speaks() {
    let (server, _) = TestServer::replying("x");
    let models = |path: &str| send(server.address, "GET", path, &[("anthropic-version", "2023-06-01")], b"").json();
    let list = models("/v1/models");
    assert_eq!((&list["first_id"], &list["has_more"]), (&json!("tiny"), &json!(false)));
    for model in [&list["data"][0], &models("/v1/models/tiny")] {
        assert_eq!(
            (&model["type"], &model["id"], &model["display_name"]),
            (&json!("model"), &json!("tiny"), &json!("tiny"))
        );
        assert!(model["created_at"].as_str().unwrap().ends_with('Z'), "{model}");
    }
    assert_eq!(get(server.address, "/v1/models").json()["object"], "list");
}
