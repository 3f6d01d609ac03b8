//! Reasoning and tool calls over HTTP, with a scripted engine that replays model outputs.

use crate::support::client::{post, post_ok, with};
use crate::support::mock::MockEngine;
use crate::support::{Setup, TestServer, model_dir, tags_template};
use serde_json::{Value, json};
use std::path::PathBuf;

const CHAT: &str = "/v1/chat/completions";

const CALLS: &str = "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich \\\"Süd\\\" 🎉\"}}\n</tool_call>\n\
    <tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";

/// A chat with two tools and these fields.
fn chat(fields: Value) -> Value {
    let tool = |name: &str, properties: Value| {
        let parameters = json!({"type": "object", "properties": properties});
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    };
    let tools =
        [tool("weather", json!({"city": {"type": "string"}, "days": {"type": "integer"}})), tool("time", json!({}))];
    with(json!({"messages": [{"role": "user", "content": "hi"}], "tools": tools}), fields)
}

/// The message that a client builds from the chunks, and its finish reason.
fn stream(server: &TestServer, mut body: Value) -> (Value, Value) {
    body["stream"] = true.into();
    let events = post(server.address, CHAT, &body).events();
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let mut message = json!({"role": "assistant"});
    for event in &events[1..] {
        let delta = &event["choices"][0]["delta"];
        assert!(delta.get("role").is_none() && !delta.as_object().unwrap().is_empty(), "{delta}");
        for name in ["content", "reasoning", "reasoning_content"] {
            if let Some(text) = delta[name].as_str().filter(|text| !text.is_empty()) {
                let sofar = message[name].as_str().unwrap_or_default().to_string();
                message[name] = (sofar + text).into();
            }
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            let calls = message.as_object_mut().unwrap().entry("tool_calls").or_insert(json!([]));
            let calls = calls.as_array_mut().unwrap();
            if call.get("id").is_some() {
                assert_eq!(calls.len(), index, "calls begin in order, once");
                let name = &call["function"]["name"];
                calls
                    .push(json!({"id": call["id"], "type": call["type"], "function": {"name": name, "arguments": ""}}));
            } else {
                assert_eq!(call["function"].as_object().unwrap().len(), 1, "only arguments: {call}");
            }
            let arguments = &mut calls[index]["function"]["arguments"];
            *arguments =
                (arguments.as_str().unwrap().to_string() + call["function"]["arguments"].as_str().unwrap()).into();
        }
    }
    (message, events.last().unwrap()["choices"][0]["finish_reason"].clone())
}

/// The message and its finish reason; checks that the streamed ones are the same. Ids are replaced by `id`.
fn respond(server: &TestServer, body: Value) -> (Value, Value) {
    let plain = post_ok(server.address, CHAT, &body)["choices"][0].clone();
    let without_ids = |mut message: Value| {
        for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
            let id = call["id"].as_str().unwrap().strip_prefix("call_").unwrap();
            assert!(id.len() == 24 && id.bytes().all(|b| b.is_ascii_hexdigit()), "{id}");
            call["id"] = "id".into();
        }
        message.as_object_mut().unwrap().retain(|_, value| !value.is_null());
        message
    };
    let (streamed, finish) = stream(server, body);
    let message = without_ids(plain["message"].clone());
    assert_eq!(without_ids(streamed), message);
    assert_eq!(finish, plain["finish_reason"]);
    (message, finish)
}

fn call(name: &str, arguments: &str) -> Value {
    json!({"id": "id", "type": "function", "function": {"name": name, "arguments": arguments}})
}

#[test]
fn calls_are_fields_of_the_message() {
    let (server, control) = TestServer::replying(CALLS);
    let (message, finish) = respond(&server, chat(json!({})));
    let calls = [call("weather", "{\"city\": \"Zürich \\\"Süd\\\" 🎉\"}"), call("time", "{}")];
    assert_eq!(message, json!({"role": "assistant", "content": "I look.", "tool_calls": calls}));
    assert_eq!(finish, "tool_calls");
    let prompt = control.prompt_text();
    assert!(prompt.contains("{\"type\": \"function\", \"function\": {\"name\": \"weather\", "), "{prompt}");
    assert!(prompt.ends_with("<|im_start|>assistant\n<think>\n\n</think>\n\n"), "{prompt}");
}

#[test]
fn a_streamed_call_has_the_shape_of_openai() {
    let (server, _) =
        TestServer::replying("<tool_call>\n{\"name\": \"time\", \"arguments\": {\"a\": \"one two\"}}\n</tool_call>");
    let events =
        post(server.address, CHAT, &chat(json!({"stream": true, "stream_options": {"include_usage": true}}))).events();
    let calls: Vec<&Value> = events.iter().filter_map(|e| e["choices"][0]["delta"].get("tool_calls")).collect();
    let id = &calls[0][0]["id"];
    let first = json!([{"index": 0, "id": id, "type": "function", "function": {"name": "time", "arguments": "{"}}]);
    assert!(*calls[0] == first || calls[0][0]["function"]["arguments"] == "{\"", "{}", calls[0]);
    assert!(calls.len() > 2, "the arguments come in parts");
    for call in &calls[1..] {
        assert_eq!(call[0].as_object().unwrap().keys().collect::<Vec<_>>(), ["index", "function"]);
    }
    let tokens = events.last().unwrap()["usage"]["completion_tokens"].as_u64().unwrap() as usize;
    assert_eq!(events.len(), 1 + tokens + 1, "the role, a chunk for every token, the usage");
}

#[test]
fn content_is_null_next_to_calls() {
    let (server, _) = TestServer::replying("\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>\n");
    let plain = post_ok(server.address, CHAT, &chat(json!({})));
    let message = plain["choices"][0]["message"].as_object().unwrap();
    assert_eq!(message.keys().collect::<Vec<_>>(), ["role", "content", "tool_calls"]);
    assert_eq!(message["content"], json!(null));
}

#[test]
fn reasoning_goes_out_under_both_names() {
    let (server, control) = TestServer::replying("<think>\nHm <tool_call>.\n</think>\n\nParis.");
    let body =
        json!({"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"enable_thinking": true}});
    let reasoning = "Hm <tool_call>.";
    let message =
        json!({"role": "assistant", "content": "Paris.", "reasoning": reasoning, "reasoning_content": reasoning});
    assert_eq!(respond(&server, body.clone()), (message, json!("stop")));
    assert!(control.prompt_text().ends_with("<|im_start|>assistant\n"));

    for (effort, end) in [("high", "<|im_start|>assistant\n"), ("none", "</think>\n\n")] {
        post_ok(server.address, CHAT, &json!({"messages": body["messages"], "reasoning_effort": effort}));
        assert!(control.prompt_text().ends_with(end), "{effort}");
    }
    let mut conflict = body.clone();
    conflict["reasoning_effort"] = "none".into();
    let refused = post(server.address, CHAT, &conflict);
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("reasoning_effort")));

    let mut without = body.clone();
    without["include_reasoning"] = false.into();
    assert_eq!(respond(&server, without).0, json!({"role": "assistant", "content": "Paris."}));
    let mut short = body;
    short["max_tokens"] = 4.into();
    let (message, finish) = respond(&server, short);
    assert!(message["reasoning"].as_str().unwrap().starts_with("Hm"), "{message}");
    assert_eq!((message.get("content"), finish), (None, json!("length")));
}

#[test]
fn the_tokens_of_a_call_before_the_end_of_the_reasoning_are_no_reasoning() {
    let dir = tags_template();
    let call = "<tool_call>\n<function=time>\n</function>\n</tool_call>";
    let count = |reply: String| {
        let (engine, _) = MockEngine::replying(&reply);
        let server = TestServer::start(engine, Setup { model_dir: dir.0.clone(), ..Setup::default() });
        let usage = post_ok(server.address, CHAT, &chat(json!({})))["usage"].clone();
        usage["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap()
    };
    let alone = count("Hm.\n</think>\n\nok".into());
    assert_eq!(count(format!("Hm.\n{call}")), alone);
    assert!(count(format!("Hm.\n{call}\n</think>\n\nok")) > alone + 5, "a draft is reasoning");
    assert!(count(format!("Hm.\n{call}\nno")) > alone + 5, "a draft is reasoning");
}

#[test]
fn the_choice_of_tools() {
    let (server, control) = TestServer::replying(CALLS);
    let (message, finish) = respond(&server, chat(json!({"tool_choice": "none"})));
    assert_eq!((message["content"].as_str(), finish), (Some(CALLS), json!("stop")));
    assert!(!control.prompt_text().contains("weather"), "nothing to call");
    let (message, _) = respond(&server, chat(json!({"parallel_tool_calls": false})));
    assert_eq!(message["tool_calls"].as_array().unwrap().len(), 1);
    let (message, _) = respond(&server, chat(json!({"tools": [], "tool_choice": "auto"})));
    assert_eq!(message["content"], CALLS);
}

#[test]
fn a_call_can_be_forced() {
    let required = "{\"name\": \"time\", \"arguments\": {\"a\": [1]}}\n</tool_call>";
    let (server_required, control) = TestServer::replying(required);
    let (message, finish) = respond(&server_required, chat(json!({"tool_choice": "required"})));
    assert_eq!(message, json!({"role": "assistant", "tool_calls": [call("time", "{\"a\": [1]}")]}));
    assert_eq!(finish, "tool_calls");
    assert!(control.prompt_text().ends_with("</think>\n\n<tool_call>\n"));

    let (server_named, control) =
        TestServer::replying(" {\"city\": \"Bern\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"time\"}\n</tool_call>");
    let choice = json!({"type": "function", "function": {"name": "weather"}});
    let (message, finish) = respond(&server_named, chat(json!({"tool_choice": choice})));
    assert_eq!(message["tool_calls"], json!([call("weather", "{\"city\": \"Bern\"}")]));
    assert_eq!(finish, "stop", "as in OpenAI's API, where the client named the function");
    assert!(control.prompt_text().ends_with("<tool_call>\n{\"name\": \"weather\", \"arguments\":"));
}

#[test]
fn calls_that_are_cut_off_or_wrong() {
    let (long, _) = TestServer::replying(
        "<tool_call>\n{\"name\": \"time\", \"arguments\": {\"a\": \"one two three four five six\"}}\n</tool_call>",
    );
    let (message, finish) = respond(&long, chat(json!({"max_tokens": 20})));
    let arguments = message["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
    let text = serde_json::from_str::<Value>(arguments).unwrap()["a"].as_str().unwrap().to_owned();
    assert!("one two three four five six".starts_with(&text) && text.len() < 27, "{arguments}");
    assert_eq!(finish, "length");
    let (stopped, _) =
        TestServer::replying("Call.\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>");
    let (message, finish) = respond(&stopped, chat(json!({"stop": "\"name\""})));
    assert_eq!((message, finish), (json!({"role": "assistant", "content": "Call.\n<tool_call>\n{"}), json!("stop")));
    let (wrong, _) = TestServer::replying("<tool_call>\n{\"name\": time}\n</tool_call>");
    let (message, finish) = respond(&wrong, chat(json!({})));
    assert_eq!(
        (message["content"].as_str(), finish),
        (Some("<tool_call>\n{\"name\": time}\n</tool_call>"), json!("stop"))
    );
}

#[test]
fn the_history_may_have_calls_and_their_results() {
    let (server, control) = TestServer::replying("Sunny.");
    let (first, _) = respond(&TestServer::replying(CALLS).0, chat(json!({})));
    let messages = json!([{"role": "user", "content": "hi"}, first,
        {"role": "tool", "tool_call_id": "id", "content": "sunny"}, {"role": "tool", "tool_call_id": "id", "content": "12:00"}]);
    let (message, finish) = respond(&server, chat(json!({"messages": messages})));
    assert_eq!((message["content"].as_str(), finish), (Some("Sunny."), json!("stop")));
    let history = format!(
        "<|im_start|>assistant\n{CALLS}<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n\
        <tool_response>\n12:00\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    );
    assert!(control.prompt_text().contains(&history), "{}", control.prompt_text());
}

#[test]
fn results_that_are_no_text_are_replaced_by_a_note() {
    let (server, control) = TestServer::replying("ok");
    let parts = |role: &str| {
        let image = json!({"type": "image_url", "image_url": {"url": "data:"}});
        let content = json!([{"type": "text", "text": "x"}, image]);
        json!({"role": role, "tool_call_id": "c", "content": content})
    };
    let call = json!({"id": "c", "type": "function", "function": {"name": "time", "arguments": "{}"}});
    let refusal =
        json!({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "tool_calls": [call]});
    let messages = json!([{"role": "user", "content": "hi"}, refusal, parts("tool")]);
    let response = post(server.address, CHAT, &chat(json!({"messages": messages})));
    let ignored = response.header("x-ignored-fields").unwrap_or_default().to_string();
    assert_eq!((response.status, ignored.as_str()), (200, "messages[].content[].image_url"));
    let prompt = control.prompt_text();
    let result = "<tool_response>\nx\n[image left out: this model reads only text]\n</tool_response>";
    assert!(prompt.contains(result) && prompt.contains("assistant\nNo.\n<tool_call>"), "{prompt}");
    let response = post(server.address, CHAT, &chat(json!({"messages": [parts("user")]})));
    assert_eq!(response.status, 400, "a question about an image");
    assert!(response.text().contains("of type \\\"image_url\\\": this model reads only text"));
}

/// A directory with the bundled tokenizer and its own template.
fn checkpoint(name: &str, template: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("pegainfer-tools-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::copy(model_dir().join("tokenizer.json"), dir.join("tokenizer.json")).unwrap();
    std::fs::write(dir.join("chat_template.jinja"), template).unwrap();
    dir
}

#[test]
fn the_template_decides_how_calls_are_written() {
    // Like Qwen3.5: calls in tags, and the prompt opens the reasoning.
    let template = "{% if false %}<tool_call>\n<function=f>{% endif %}{{ messages[0].content }}<think>\n{# </think> #}";
    let dir = checkpoint("coder", template);
    let start = |reply: &str| {
        let (engine, control) = MockEngine::replying(reply);
        (TestServer::start(engine, Setup { model_dir: dir.clone(), ..Setup::default() }), control)
    };
    let parameters =
        "<parameter=city>\nBern \"Ost\"\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>";
    let weather = call("weather", "{\"city\": \"Bern \\\"Ost\\\"\", \"days\": 3}");
    let (server, _) = start(&format!("I look.\n</think>\n\n<tool_call>\n<function=weather>\n{parameters}"));
    let (message, finish) = respond(&server, chat(json!({})));
    assert_eq!((&message["reasoning"], &message["tool_calls"]), (&json!("I look."), &json!([weather])));
    assert_eq!(finish, "tool_calls");

    let (server, control) = start(parameters);
    let choice = json!({"type": "function", "function": {"name": "weather"}});
    let (message, _) = respond(&server, chat(json!({"tool_choice": choice})));
    assert_eq!(message, json!({"role": "assistant", "tool_calls": [weather]}));
    assert_eq!(control.prompt_text(), "hi<think>\n\n</think>\n\n<tool_call>\n<function=weather>\n");

    let plain = checkpoint("plain", "{{ messages[0].content }}");
    let (engine, _) = MockEngine::replying("x");
    let server = TestServer::start(engine, Setup { model_dir: plain.clone(), ..Setup::default() });
    let error = post(server.address, CHAT, &chat(json!({}))).json();
    assert_eq!((&error["error"]["param"], &error["error"]["code"]), (&json!("tools"), &json!("unsupported_parameter")));
    for dir in [dir, plain] {
        std::fs::remove_dir_all(dir).unwrap();
    }
}
