//! Additions of coding agents to the plain API: summaries of the reasoning, images in outputs, several instructions,
//! custom tools.

use super::client::{RESPONSES, body, respond, weather};
use crate::support::client::{post, post_ok};
use crate::support::mock::MockEngine;
use crate::support::{Setup, TestServer, tags_template, tokenizer};
use serde_json::json;

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
    let template = tags_template();
    let tags = TestServer::start(engine, Setup { model_dir: template.0.clone(), ..Setup::default() });
    post_ok(tags.address, RESPONSES, &body(json!({"input": input, "tools": weather()})));
    assert!(shown.prompt_text().contains("<think>\nHm, so.\n</think>"), "{}", shown.prompt_text());
    assert!(control.added() > 0);
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
    assert_eq!(response.header("x-ignored-fields"), Some("input[].output[].input_image"));
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
    let template = tags_template();
    let server = TestServer::start(engine, Setup { model_dir: template.0.clone(), ..Setup::default() });
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
        for id in tokenizer().encode(text, false).unwrap() {
            assert_eq!(allows(mask.words(), id), allowed, "{text}");
            if allowed {
                mask = matcher.next(id).unwrap();
            }
        }
    }
}

/// Codex sends its code tools as an item, with custom tools in a namespace.
#[test]
fn additional_tools_are_tools_of_the_request() {
    let (engine, control) = MockEngine::replying("<parameter=input>\n1 + 1\n</parameter>\n</function>\n</tool_call>");
    let template = tags_template();
    let server = TestServer::start(engine, Setup { model_dir: template.0.clone(), ..Setup::default() });
    let exec = json!({"type": "custom", "name": "exec", "description": "Runs JavaScript."});
    let wait = json!({"name": "wait", "parameters": {"type": "object"}});
    let hosted = json!({"type": "image_generation", "name": "draw"});
    let namespace = json!({"type": "namespace", "name": "functions", "tools": [exec, wait, hosted]});
    let tools = json!([namespace, {"type": "web_search"}, weather()[0]]);
    let more = json!({"type": "additional_tools", "role": "developer", "id": "at_1", "tools": tools});
    let call =
        json!({"type": "custom_tool_call", "call_id": "c", "namespace": "functions", "name": "exec", "input": "2"});
    let output = json!({"type": "custom_tool_call_output", "call_id": "c", "output": "2"});
    let input = json!([more, {"role": "user", "content": "hi"}, call, output]);
    let choice = json!({"type": "custom", "namespace": "functions", "name": "exec"});
    let fields = json!({"input": input, "tools": weather(), "tool_choice": choice});
    let response = respond(&server, body(fields.clone()));
    let expected = json!({"type": "custom_tool_call", "id": "ctc_r1_0", "status": "completed", "call_id": "id",
        "namespace": "functions", "name": "exec", "input": "1 + 1"});
    assert_eq!(response["output"][0], expected);
    let response = post(server.address, RESPONSES, &body(fields));
    let ignored = response.header("x-ignored-fields").unwrap().to_owned();
    assert!(
        ignored.contains("tools[].tools[].image_generation") && ignored.contains("tools[].web_search"),
        "{ignored}"
    );
    let prompt = control.prompt_text();
    for (name, count) in [("\"functions.exec\"", 1), ("\"functions.wait\"", 1), ("\"weather\"", 1)] {
        assert_eq!(prompt.matches(&format!("\"name\": {name}")).count(), count, "{prompt}");
    }
    assert!(prompt.contains("<function=functions.exec>\n<parameter=input>\n2\n"), "{prompt}");
    // The item alone, as in a first request.
    let alone = json!({"input": [{"type": "additional_tools", "tools": []}, {"role": "user", "content": "hi"}]});
    assert_eq!(post(server.address, RESPONSES, &body(alone)).status, 200);
    let wrong = json!({"input": [{"type": "additional_tools", "tools": [{"type": "function"}]}]});
    let response = post(server.address, RESPONSES, &body(wrong));
    assert_eq!(response.status, 400);
    assert!(response.text().contains("input[0].tools[0].name"));
}
