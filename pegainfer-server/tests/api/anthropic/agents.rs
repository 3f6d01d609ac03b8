//! Additions of coding agents to the plain API: instructions in the middle, results that are not text, deferred tools,
//! calls that were cut off.

use super::client::{CALL, MESSAGES, body, respond, weather};
use crate::support::client::{post, post_ok, post_with};
use crate::support::mock::{Control, MockEngine};
use crate::support::{Setup, TestServer, tokenizer};
use serde_json::{Value, json};

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
    let tokens = tokenizer().encode(cut, false).unwrap().len();
    let message = post_ok(server.address, MESSAGES, &body(json!({"tools": weather(), "max_tokens": tokens})));
    assert_eq!(
        (&message["stop_reason"], &message["content"][0]["input"]),
        (&json!("max_tokens"), &json!({"city": "Bern", "days": "thr"}))
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
    let server = TestServer::start(engine, Setup::default());
    let billing = "x-anthropic-billing-header: cc_version=2.1.330.f8c; cc_entrypoint=sdk-cli;";
    let system = json!([{"type": "text", "text": billing}, {"type": "text", "text": "Be kind."}]);
    let body = body(json!({ "system": system }));
    for (agent, kept) in [("claude-cli/2.1.330 (external, sdk-cli)", false), ("another/1.0", true)] {
        assert_eq!(post_with(server.address, MESSAGES, ("User-Agent", agent), &body).status, 200);
        let prompt = control.prompt_text();
        assert_eq!((prompt.contains(billing), prompt.contains("Be kind.")), (kept, true), "{prompt}");
    }
}
