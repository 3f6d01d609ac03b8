//! `/v1/responses` over HTTP, with a scripted engine that replays model outputs.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use support::TestServer;
use support::client::{post, post_ok, with};

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
        for item in response["output"].as_array_mut().unwrap().iter_mut().filter(|i| i["type"] == "function_call") {
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
        (json!({"store": true}), "store"),
        (json!({"background": true}), "background"),
        (json!({"include": ["reasoning.encrypted_content"]}), "include"),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"reasoning": {"effort": "most"}}), "reasoning"),
        (json!({"reasoning": {"summary": "auto"}}), "reasoning"),
        (json!({"text": {"verbosity": "low"}}), "text"),
        (json!({"text": {"format": {"type": "json_schema", "schema": {"type": "rocket"}}}}), "text"),
        (json!({"tools": [{"type": "web_search"}]}), "tools"),
        (json!({"tool_choice": {"type": "web_search"}}), "tool_choice"),
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input"),
        (json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}), "input"),
        (json!({"input": [{"role": "robot", "content": "x"}]}), "input"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"n": 2}), "n"),
        (json!({"max_tokens": 2}), "max_tokens"),
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
