//! `/v1/messages` over HTTP, with a scripted engine that replays model outputs.

mod agents;
mod client;
mod errors;

use crate::support::client::{get, post, post_ok, send, with};
use crate::support::mock::MockEngine;
use crate::support::{Setup, TestServer, tags_template};
use client::{CALL, MESSAGES, body, respond, stream, weather};
use serde_json::json;

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
    let blocks = message["content"].clone();
    assert_eq!((&blocks[0]["type"], &blocks[0]["thinking"]), (&json!("thinking"), &json!("Hm.")));
    assert_eq!(blocks[1], json!({"type": "text", "text": "Paris it is."}));
    assert!(control.prompt_text().ends_with("<|im_start|>assistant\n"), "{}", control.prompt_text());
    assert!(control.last().grammar.is_none());
    respond(&server, &body(json!({"thinking": {"type": "enabled", "budget_tokens": 1024}})));
    assert!(control.last().grammar.is_some(), "which counts the tokens");
    respond(&server, &body(json!({"output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}})));
    assert!(control.prompt_text().ends_with("<|im_start|>assistant\n"), "{}", control.prompt_text());
    // As in Anthropic's API, the model does not reason unless asked to.
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
fn reasoning_that_is_not_shown_comes_back_in_its_signature() {
    let (server, _) = TestServer::replying("<think>\nHm.\n</think>\n\nParis it is.");
    let thinking = |display: &str| json!({"thinking": {"type": "adaptive", "display": display}});
    let message = respond(&server, &body(thinking("omitted")));
    let hidden = &message["content"][0];
    assert_eq!((&hidden["type"], &hidden["thinking"]), (&json!("thinking"), &json!("")));
    assert_eq!(message["content"][1], json!({"type": "text", "text": "Paris it is."}));
    let events = stream(&server, &with(body(thinking("omitted")), json!({"stream": true})));
    assert!(events.iter().all(|event| event["delta"]["type"] != "thinking_delta"), "{events:?}");
    assert_eq!(respond(&server, &body(thinking("summarized")))["content"][0]["thinking"], "Hm.");
    for (display, ignored) in [("omitted", None), ("summarized", None), ("updates", Some("thinking.display"))] {
        let response = post(server.address, MESSAGES, &body(thinking(display)));
        assert_eq!((response.status, response.header("x-ignored-fields")), (200, ignored), "{display}");
    }
    // A template that shows the reasoning between calls.
    let (engine, control) = MockEngine::replying("ok");
    let tags = tags_template();
    let server = TestServer::start(engine, Setup { model_dir: tags.0.clone(), ..Setup::default() });
    let call = json!({"type": "tool_use", "id": "t", "name": "weather", "input": {}});
    let result = json!([{"type": "tool_result", "tool_use_id": "t", "content": "sunny"}]);
    let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": [hidden, call]},
        {"role": "user", "content": result}]);
    post_ok(server.address, MESSAGES, &body(json!({"messages": messages, "tools": weather()})));
    assert!(control.prompt_text().contains("<think>\nHm.\n</think>"), "{}", control.prompt_text());
}

#[test]
fn every_thinking_block_has_a_signature_that_is_accepted() {
    let (server, _) = TestServer::replying("<think>\nHm.\n</think>\n\nParis it is.");
    for display in ["omitted", "summarized"] {
        let request = body(json!({"thinking": {"type": "adaptive", "display": display}}));
        let content = respond(&server, &request)["content"].clone();
        let signature = content[0]["signature"].as_str().unwrap();
        assert!(!signature.is_empty(), "{display}: {content}");
        let events = stream(&server, &with(request, json!({"stream": true})));
        let deltas: Vec<&str> = events.iter().filter_map(|event| event["delta"]["signature"].as_str()).collect();
        assert_eq!(deltas, [signature], "{display}");
        let history = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": content},
            {"role": "user", "content": "go on"}]);
        respond(&server, &body(json!({"messages": history})));
    }
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
