//! `/v1/responses` over HTTP, with a scripted engine that replays model outputs.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use support::TestServer;
use support::client::{post, post_ok, with};
use support::mock::MockEngine;

const RESPONSES: &str = "/v1/responses";
const CALL: &str = "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\"}}\n</tool_call>";

fn body(fields: Value) -> Value {
    with(json!({"model": "tiny", "input": "hi", "store": false}), fields)
}

fn weather() -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!([{"type": "function", "name": "weather", "parameters": parameters, "strict": null}])
}

/// The events of a stream, checked to be numbered and to carry their own names.
fn stream(server: &TestServer, body: &Value) -> Vec<Value> {
    let text = post(server.address, RESPONSES, body).text();
    let event = |(i, event): (usize, &str)| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        assert_eq!(data["sequence_number"], i);
        data
    };
    text.trim_end().split("\n\n").enumerate().map(event).collect()
}

/// The output items that a client builds from the events, checked against the complete items in the closing events.
fn assemble(events: &[Value]) -> Vec<Value> {
    let mut items: Vec<Value> = vec![];
    let append = |to: &mut Value, event: &Value| {
        *to = (to.as_str().unwrap().to_string() + event["delta"].as_str().unwrap()).into();
    };
    for event in events {
        let kind = event["type"].as_str().unwrap();
        if event.get("item_id").is_some() {
            let at = event["output_index"].as_u64().unwrap() as usize;
            assert_eq!((event["item_id"].clone(), at + 1), (items[at]["id"].clone(), items.len()), "{event}");
        }
        let item = items.last_mut();
        match kind.strip_prefix("response.").unwrap() {
            "created" | "in_progress" | "completed" | "incomplete" => {}
            "output_item.added" => {
                assert_eq!(
                    (&event["item"]["status"], event["output_index"].as_u64()),
                    (&json!("in_progress"), Some(items.len() as u64))
                );
                items.push(event["item"].clone());
            }
            "content_part.added" => item.unwrap()["content"] = json!([event["part"]]),
            "reasoning_summary_part.added" => item.unwrap()["summary"] = json!([event["part"]]),
            "reasoning_summary_text.delta" => append(&mut item.unwrap()["summary"][0]["text"], event),
            "reasoning_summary_text.done" => assert_eq!(item.unwrap()["summary"][0]["text"], event["text"]),
            "reasoning_summary_part.done" => assert_eq!(item.unwrap()["summary"][0], event["part"]),
            "custom_tool_call_input.delta" => append(&mut item.unwrap()["input"], event),
            "custom_tool_call_input.done" => assert_eq!(item.unwrap()["input"], event["input"]),
            "output_text.delta" | "reasoning_text.delta" => append(&mut item.unwrap()["content"][0]["text"], event),
            "function_call_arguments.delta" => append(&mut item.unwrap()["arguments"], event),
            "output_text.done" | "reasoning_text.done" => {
                assert_eq!(item.unwrap()["content"][0]["text"], event["text"])
            }
            "function_call_arguments.done" => assert_eq!(item.unwrap()["arguments"], event["arguments"]),
            "content_part.done" => assert_eq!(item.unwrap()["content"][0], event["part"]),
            "output_item.done" => {
                let item = item.unwrap();
                item["status"] = event["item"]["status"].clone();
                assert_eq!(*item, event["item"]);
            }
            other => panic!("{other}"),
        }
    }
    items
}

/// The response; checks that the streamed one is the same, except for its ids.
fn respond(server: &TestServer, mut body: Value) -> Value {
    body["request_id"] = "r1".into();
    let without_ids = |mut response: Value| {
        response["created_at"] = 0.into();
        for item in response["output"].as_array_mut().unwrap().iter_mut().filter(|i| i.get("call_id").is_some()) {
            item["call_id"] = "id".into();
        }
        response
    };
    let plain = without_ids(post_ok(server.address, RESPONSES, &body));
    body["stream"] = true.into();
    let events = stream(server, &body);
    let last = events.last().unwrap();
    assert_eq!(last["response"]["output"], json!(assemble(&events)));
    assert_eq!(without_ids(last["response"].clone()), plain);
    plain
}

#[test]
fn a_response_has_the_shape_of_openai() {
    let (server, control) = TestServer::replying(" a cat");
    let fields =
        json!({"instructions": "Be kind.", "max_output_tokens": 50, "temperature": 0.5, "metadata": {"a": "b"}});
    let response = respond(&server, body(fields));
    let count = control.last().prompt.len();
    let item = json!({"id": "msg_r1_0", "type": "message", "status": "completed", "role": "assistant",
        "content": [{"type": "output_text", "text": " a cat", "annotations": [], "logprobs": []}]});
    let usage = json!({"input_tokens": count, "input_tokens_details": {"cached_tokens": count / 2}, "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": count + 3});
    let expected = json!({"id": "resp_r1", "object": "response", "created_at": 0, "status": "completed", "error": null,
        "incomplete_details": null, "model": "tiny", "output": [item], "previous_response_id": null, "store": false,
        "truncation": "disabled", "usage": usage, "instructions": "Be kind.", "max_output_tokens": 50,
        "metadata": {"a": "b"}, "parallel_tool_calls": true, "reasoning": null, "temperature": 0.5,
        "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": null});
    assert_eq!(response, expected);
    assert_eq!(control.last().max_tokens, 50);
    let prompt = control.prompt_text();
    assert!(prompt.contains("system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>"), "{prompt}");
}

#[test]
fn a_stream_begins_and_ends_with_the_response() {
    let (server, _) = TestServer::replying(" a cat");
    let events = stream(&server, &body(json!({"stream": true})));
    let mut names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    names.dedup();
    let expected = [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ];
    assert_eq!(names, expected.map(|name| format!("response.{name}")));
    let (first, last) = (&events[0]["response"], &events.last().unwrap()["response"]);
    assert_eq!(
        (&first["status"], &first["output"], &first["usage"]),
        (&json!("in_progress"), &json!([]), &json!(null))
    );
    assert_eq!((&last["status"], &last["id"]), (&json!("completed"), &first["id"]));
}

#[test]
fn tools_and_their_results() {
    let (server, control) = TestServer::replying(CALL);
    let response = respond(&server, body(json!({"tools": weather()})));
    let call = json!({"id": "fc_r1_1", "type": "function_call", "status": "completed", "call_id": "id",
        "name": "weather", "arguments": "{\"city\": \"Bern\"}"});
    assert_eq!(response["output"][0]["content"][0]["text"], "I look.");
    assert_eq!(response["output"][1], call);
    let mut input = vec![json!({"role": "user", "content": [{"type": "input_text", "text": "hi"}]})];
    input.extend(response["output"].as_array().unwrap().clone());
    input.push(json!({"type": "function_call_output", "call_id": "id", "output": "sunny"}));
    respond(&server, body(json!({"tools": weather(), "input": input})));
    let history = format!(
        "user\nhi<|im_end|>\n<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>user\n\
        <tool_response>\nsunny\n</tool_response><|im_end|>"
    );
    assert!(control.prompt_text().contains(&history), "{}", control.prompt_text());
    let named = json!({"type": "function", "name": "weather"});
    post_ok(server.address, RESPONSES, &body(json!({"tools": weather(), "tool_choice": named})));
    assert!(control.prompt_text().ends_with("{\"name\": \"weather\", \"arguments\":"));
    assert!(control.last().grammar.is_some());
}

#[test]
fn reasoning_is_an_item_and_a_cut_answer_is_incomplete() {
    let (server, control) = TestServer::replying("<think>\nHm, so.\n</think>\n\nParis it is.");
    let thinking = json!({"chat_template_kwargs": {"enable_thinking": true}});
    let response = respond(&server, body(thinking.clone()));
    let output = &response["output"];
    assert_eq!((&output[0]["type"], &output[1]["type"]), (&json!("reasoning"), &json!("message")));
    assert_eq!(output[0]["content"], json!([{"type": "reasoning_text", "text": "Hm, so."}]));
    let reasoning = response["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!(reasoning > 3 && reasoning < response["usage"]["output_tokens"].as_u64().unwrap(), "{response}");
    respond(
        &server,
        body(json!({"input": [{"role": "user", "content": "hi"}, output[0], output[1],
        {"role": "user", "content": "go on"}]})),
    );
    let prompt_now = control.prompt_text();
    assert!(prompt_now.contains("assistant\nParis it is.<|im_end|>"), "{prompt_now}");
    let mut short = thinking;
    short["max_output_tokens"] = 4.into();
    let response = respond(&server, body(short));
    assert_eq!((&response["status"], &response["output"][0]["status"]), (&json!("incomplete"), &json!("incomplete")));
    assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    respond(&server, body(json!({"reasoning": {"effort": "none"}})));
    assert!(control.prompt_text().ends_with("</think>\n\n"));
    respond(&server, body(json!({"reasoning": {"effort": "medium"}})));
    assert!(control.prompt_text().ends_with("<|im_start|>assistant\n"));
    let format = json!({"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}});
    post_ok(server.address, RESPONSES, &body(json!({"text": format})));
    assert!(control.last().grammar.is_some());
}

#[test]
fn what_is_not_implemented_is_refused_by_its_own_name() {
    let (server, control) = TestServer::replying("one two three");
    for (fields, param) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"background": true}), "background"),
        (json!({"reasoning": {"effort": "most"}}), "reasoning"),
        (json!({"text": {"format": {"type": "json_schema", "schema": {"type": "rocket"}}}}), "text"),
        (json!({"tool_choice": {"type": "web_search"}}), "tool_choice"),
        (json!({"tool_choice": {"type": "function", "name": "f"}}), "tool_choice"),
        (json!({"tools": [{"type": "custom", "name": "p", "format": {"type": "grammar"}}]}), "tools"),
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input"),
        (json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}), "input"),
        (json!({"input": [{"role": "robot", "content": "x"}]}), "input"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
    ] {
        let response = post(server.address, RESPONSES, &body(fields.clone()));
        let (status, error) = (response.status, response.json()["error"].clone());
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{fields}: {error}");
        assert!(error["message"].as_str().unwrap().contains(param.split('.').next().unwrap()), "{fields}: {error}");
    }
    assert_eq!(control.added(), 0);
    control.allow(2);
    control.fail.store(true, Ordering::SeqCst);
    let events = stream(&server, &body(json!({"stream": true})));
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert!(last["response"]["error"]["message"].as_str().unwrap().contains("the scripted step failed"), "{last}");
}

#[test]
fn what_has_no_effect_is_reported() {
    let (server, _) = TestServer::replying("ok");
    for (fields, expected) in [
        (json!({"store": true}), "store"),
        (json!({"include": ["reasoning.encrypted_content"]}), "include"),
        (json!({"include": []}), ""),
        (json!({"truncation": "auto", "service_tier": "priority"}), "truncation, service_tier"),
        (json!({"text": {"verbosity": "low"}}), "text.verbosity"),
        (json!({"text": {"verbosity": "medium"}, "service_tier": "auto"}), ""),
        (
            json!({"tools": [{"type": "web_search", "external_web_access": false}]}),
            "tools[].external_web_access, tools[].web_search",
        ),
        (json!({"client_metadata": {"a": 1}, "prompt_cache_key": "k"}), "client_metadata"),
        (json!({"n": 2, "max_tokens": 2}), "n, max_tokens"),
        (
            json!({"input": [{"role": "user", "content": "hi"}, {"type": "web_search_call", "id": "w", "status": "completed"}]}),
            "input[].web_search_call",
        ),
    ] {
        let response = post(server.address, RESPONSES, &body(fields.clone()));
        let ignored = response.header("x-ignored-fields").unwrap_or_default().to_string();
        assert_eq!((response.status, ignored.as_str()), (200, expected), "{fields}");
    }
}

#[test]
fn reasoning_is_a_summary_where_one_is_asked_for() {
    let (server, control) = TestServer::replying("<think>\nHm, so.\n</think>\n\nParis it is.");
    let asked = json!({"effort": "medium", "summary": "auto"});
    let response = respond(&server, body(json!({ "reasoning": asked })));
    let item = &response["output"][0];
    assert_eq!(item["summary"], json!([{"type": "summary_text", "text": "Hm, so."}]));
    assert_eq!(item.get("content"), None);
    let call = json!({"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"});
    let output = json!({"type": "function_call_output", "call_id": "c", "output": "sunny"});
    let input = json!([{"role": "user", "content": "hi"}, item, call, output]);
    let (engine, shown) = MockEngine::replying("ok");
    let tags = TestServer::start(engine, support::Setup { model_dir: tags_dir(), ..support::Setup::default() });
    post_ok(tags.address, RESPONSES, &body(json!({"input": input, "tools": weather()})));
    assert!(shown.prompt_text().contains("<think>\nHm, so.\n</think>"), "{}", shown.prompt_text());
    assert!(control.added() > 0);
}

/// The bundled tokenizer with a template whose calls are tags, and that shows reasoning between calls.
fn tags_dir() -> std::path::PathBuf {
    let dir = std::env::temp_dir().join(format!("pegainfer-responses-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(support::model_dir().join(file), dir.join(file)).unwrap();
    }
    std::fs::write(dir.join("chat_template.jinja"), include_str!("fixtures/agents/tags.jinja")).unwrap();
    dir
}

#[test]
fn instructions_are_merged_and_images_in_outputs_noted() {
    let (server, control) = TestServer::replying("ok");
    let output =
        json!([{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "data:", "detail": "auto"}]);
    let input = json!([{"role": "developer", "content": "a"}, {"role": "system", "content": "b"},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{\"city\": \"Be"},
        {"type": "function_call_output", "call_id": "1", "output": output}]);
    let fields = json!({"instructions": "i", "input": input, "tools": weather()});
    let response = post(server.address, RESPONSES, &body(fields));
    assert_eq!(
        response.header("x-ignored-fields"),
        Some("input[].output[].image_url, input[].output[].detail, input[].output[].input_image")
    );
    let prompt = control.prompt_text();
    assert!(prompt.contains("system\ni\n\na\n\nb\n\n# Tools"), "{prompt}");
    assert!(prompt.contains("\"arguments\": {\"city\": \"Be}\n</tool_call>"), "{prompt}");
    assert!(
        prompt.contains("<tool_response>\nx\n[image left out: this model reads only text]\n</tool_response>"),
        "{prompt}"
    );
}

#[test]
fn a_forced_call_comes_before_the_form_of_the_text() {
    let (server, control) = TestServer::replying(" {\"city\": \"Bern\"}}\n</tool_call>");
    let format = json!({"type": "json_schema", "name": "x", "schema": {"type": "object"}});
    for choice in [
        json!({"type": "function", "name": "weather"}),
        json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}),
    ] {
        let fields = json!({"tools": weather(), "tool_choice": choice, "text": {"format": format}});
        post_ok(server.address, RESPONSES, &body(fields));
        assert!(
            control.prompt_text().contains("<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>\n"),
            "{choice}"
        );
        assert!(control.last().grammar.is_some());
    }
}

#[test]
fn a_custom_tool_is_held_to_its_grammar_where_values_have_no_quotes() {
    let reply = "<parameter=input>\nab\n</parameter>\n</function>\n</tool_call>";
    let (engine, control) = MockEngine::replying(reply);
    let server = TestServer::start(engine, support::Setup { model_dir: tags_dir(), ..support::Setup::default() });
    let format = json!({"type": "grammar", "syntax": "lark", "definition": "start: /[ab]+/"});
    let tools = json!([{"type": "custom", "name": "patch", "description": "d", "format": format}]);
    let choice = json!({"type": "custom", "name": "patch"});
    let response = respond(&server, body(json!({"tools": tools, "tool_choice": choice})));
    let call = json!({"type": "custom_tool_call", "id": "ctc_r1_0", "status": "completed", "call_id": "id", "name": "patch", "input": "ab"});
    assert_eq!(response["output"][0], call);
    let grammar = control.last().grammar.unwrap();
    let (mut matcher, mut mask) = grammar.start();
    let allows = |words: &[u32], id: u32| words[id as usize / 32] >> (id % 32) & 1 == 1;
    for (text, allowed) in [("<parameter=input>\nab", true), ("c", false)] {
        for id in support::tokenizer().encode(text, false).unwrap() {
            assert_eq!(allows(mask.words(), id), allowed, "{text}");
            if allowed {
                mask = matcher.next(id).unwrap();
            }
        }
    }
}
