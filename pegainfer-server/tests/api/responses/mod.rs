//! `/v1/responses` over HTTP, with a scripted engine that replays model outputs.

mod agents;
mod client;
mod fields;

use crate::support::TestServer;
use crate::support::client::post_ok;
use client::{CALL, RESPONSES, body, respond, stream, weather};
use serde_json::json;

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
