//! Structured output over HTTP with the bundled checkpoint, which writes no JSON without a grammar.

use crate::support::client::{post, post_ok, with};
use crate::support::{TestServer, tokenizer};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn completion(fields: Value) -> Value {
    with(json!({"prompt": "Once upon a time", "max_tokens": 200, "temperature": 1.0, "seed": 5}), fields)
}

fn chat(fields: Value) -> Value {
    let messages = json!([{"role": "user", "content": "Tell me about a cat."}]);
    with(json!({"messages": messages, "max_tokens": 200, "temperature": 1.0, "seed": 5}), fields)
}

/// An object with a short name, an age and a colour.
fn schema() -> Value {
    json!({"type": "object", "additionalProperties": false, "required": ["name", "age", "colour"], "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 1, "maximum": 30},
        "colour": {"enum": ["black", "white"]}}})
}

fn check(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text:?}"));
    assert_eq!(value.as_object().unwrap().len(), 3, "{text:?}");
    assert!(value["name"].as_str().unwrap().chars().count() <= 12, "{text:?}");
    assert!((1..=30).contains(&value["age"].as_i64().unwrap()), "{text:?}");
    assert!(["black", "white"].contains(&value["colour"].as_str().unwrap()), "{text:?}");
}

#[test]
fn every_choice_fits_the_schema_streamed_or_not() {
    let server = TestServer::bundled();
    let format = json!({"type": "json_schema", "json_schema": {"name": "cat", "schema": schema()}});
    let body = completion(json!({"response_format": format, "n": 4, "logprobs": 0}));
    let plain = post_ok(server.address, COMPLETIONS, &body);
    let texts: Vec<&str> =
        plain["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    texts.iter().for_each(|text| check(text));
    assert!(texts.iter().any(|text| text != &texts[0]), "sampled within the schema: {texts:?}");
    assert!(plain["choices"].as_array().unwrap().iter().all(|choice| choice["finish_reason"] == "stop"));
    let events = post(server.address, COMPLETIONS, &with(body, json!({"stream": true}))).events();
    for (i, text) in texts.iter().enumerate() {
        let of_choice = events.iter().filter(|event| event["choices"][0]["index"] == i);
        let streamed: String = of_choice.map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(streamed, *text);
    }
    let response = post_ok(server.address, CHAT, &chat(json!({"response_format": format})));
    check(response["choices"][0]["message"]["content"].as_str().unwrap());
}

#[test]
fn the_other_ways_to_say_what_is_wanted() {
    let server = TestServer::bundled();
    let text = |outputs: Value| {
        let response = post_ok(server.address, COMPLETIONS, &completion(json!({"structured_outputs": outputs})));
        assert_eq!(response["choices"][0]["finish_reason"], "stop", "{response}");
        response["choices"][0]["text"].as_str().unwrap().to_string()
    };
    check(&text(json!({"json": schema()})));
    assert!(["red", "green, or so"].contains(&text(json!({"choice": ["red", "green, or so"]})).as_str()));
    let date = text(json!({"regex": "(19|20)\\d\\d-[01]\\d"}));
    assert!(date.len() == 7 && date.as_bytes()[4] == b'-', "{date:?}");
    let sum = text(json!({"grammar": "start: N (\"+\" N){1,3}\nN: /[0-9]{1,3}/"}));
    assert!(sum.contains('+') && sum.split('+').all(|n| n.parse::<u16>().is_ok_and(|n| n < 1000)), "{sum:?}");
    // The tiny model does not end its objects, but it always begins one.
    let response = post_ok(server.address, CHAT, &chat(json!({"response_format": {"type": "json_object"}})));
    assert!(response["choices"][0]["message"]["content"].as_str().unwrap().starts_with('{'), "{response}");
    let free = completion(json!({"response_format": {"type": "text"}, "structured_outputs": {}}));
    let expected = post_ok(server.address, COMPLETIONS, &completion(json!({})));
    assert_eq!(post_ok(server.address, COMPLETIONS, &free)["choices"], expected["choices"]);
}

#[test]
fn forced_calls_fit_their_schema() {
    let server = TestServer::bundled();
    let function = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": schema()}});
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "draw"}})] {
        let body = chat(json!({"tools": [function("feed"), function("draw")], "tool_choice": choice,
            "parallel_tool_calls": false}));
        let response = post_ok(server.address, CHAT, &body);
        let calls = response["choices"][0]["message"]["tool_calls"].as_array().unwrap_or_else(|| panic!("{response}"));
        // As in OpenAI's API, a call of a named function ends with `stop`.
        let (names, finish) =
            if choice == "required" { (&["feed", "draw"][..], "tool_calls") } else { (&["draw"][..], "stop") };
        assert_eq!((calls.len(), &response["choices"][0]["finish_reason"]), (1, &json!(finish)));
        let function = &calls[0]["function"];
        check(function["arguments"].as_str().unwrap());
        assert!(names.contains(&function["name"].as_str().unwrap()), "{function}");
    }
}

#[test]
fn with_tools_an_answer_fits_its_schema_or_is_a_call() {
    let server = TestServer::bundled();
    let parameters = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let tools = json!([{"type": "function", "function": {"name": "rest", "parameters": parameters}}]);
    let format = json!({"type": "json_schema", "json_schema": {"name": "cat", "schema": schema()}});
    let either = |fields: Value| {
        let body = chat(json!({"tools": tools, "response_format": format, "parallel_tool_calls": false}));
        post_ok(server.address, CHAT, &with(body, fields))["choices"][0].clone()
    };
    // The first token decides between the two.
    let open = tokenizer().encode("<tool_call>", false).unwrap()[0].to_string();
    let response = either(json!({"logit_bias": {&open: -100}}));
    check(response["message"]["content"].as_str().unwrap_or_else(|| panic!("{response}")));
    let call = either(json!({"logit_bias": {&open: 100}}));
    let function = &call["message"]["tool_calls"][0]["function"];
    let arguments: Value = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
    assert_eq!((&function["name"], arguments), (&json!("rest"), json!({})), "{call}");
    assert_eq!((&response["finish_reason"], &call["finish_reason"]), (&json!("stop"), &json!("tool_calls")));
}

#[test]
fn reasoning_comes_before_the_structure() {
    let server = TestServer::bundled();
    let format = json!({"type": "json_schema", "json_schema": {"name": "cat", "schema": schema()}});
    let ask = |fields: Value| {
        let body = json!({"messages": [{"role": "user", "content": "What is the capital of Norway?"}], "temperature": 0,
            "chat_template_kwargs": {"enable_thinking": true}, "response_format": format, "max_tokens": 200});
        post_ok(server.address, CHAT, &with(body, fields))["choices"][0]["message"].clone()
    };
    let free = ask(json!({"response_format": null}));
    let message = ask(json!({}));
    assert_eq!((&message["reasoning"], message["reasoning"].is_string()), (&free["reasoning"], true), "{message}");
    check(message["content"].as_str().unwrap());
    // The model may also skip the reasoning, and always skips it if reasoning is switched off.
    let [open, close, call] = ["4090", "4091", "4092"];
    for fields in [json!({"logit_bias": {open: -100}}), json!({"chat_template_kwargs": {}, "logit_bias": {open: 100}})]
    {
        let message = ask(fields);
        check(message["content"].as_str().unwrap());
        assert!(message.get("reasoning").is_none(), "{message}");
    }
    // Reasoning that is cut off is not a response.
    assert_eq!(ask(json!({"max_tokens": 20, "logit_bias": {close: -100}}))["content"], json!(null));
    // With tools, the response after the reasoning may still be a call.
    let tools = json!([{"type": "function", "function": {"name": "rest", "strict": true,
        "parameters": {"type": "object", "properties": {}, "additionalProperties": false}}}]);
    let bias = json!({open: 60, close: 100, call: 20});
    let message = ask(json!({"tools": tools, "parallel_tool_calls": false, "logit_bias": bias}));
    assert_eq!(message["tool_calls"][0]["function"]["name"], "rest", "{message}");
}

#[test]
fn reasoning_ends_when_its_budget_is_used_up() {
    let server = TestServer::bundled();
    let ask = |fields: Value| {
        let body = json!({"messages": [{"role": "user", "content": "What is the capital of Norway?"}], "temperature": 0,
            "chat_template_kwargs": {"enable_thinking": true}, "return_token_ids": true, "max_tokens": 200});
        let choice = post_ok(server.address, CHAT, &with(body, fields))["choices"][0].clone();
        let ids: Vec<u64> = choice["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
        let closes = ids.iter().position(|id| *id == 4091);
        (choice["message"].clone(), closes.map(|at| at - 1), ids)
    };
    let (free, length, ids) = ask(json!({}));
    let length = length.unwrap();
    assert!(length > 5 && ids[0] == 4090 && free["content"].as_str().unwrap().contains("Oslo"), "{free}");
    for budget in [0, 1, 5] {
        let (message, used, _) = ask(json!({"thinking_token_budget": budget}));
        assert_eq!(used, Some(budget), "{message}");
        let reasoning = message["reasoning"].as_str().unwrap_or_default();
        assert!(free["reasoning"].as_str().unwrap().starts_with(reasoning), "{message}");
    }
    assert_eq!(ask(json!({"thinking_token_budget": length + 1})), (free, Some(length), ids), "as if there were none");
    let format = json!({"type": "json_schema", "json_schema": {"name": "cat", "schema": schema()}});
    let (message, used, _) = ask(json!({"thinking_token_budget": 3, "response_format": format}));
    assert_eq!(used, Some(3));
    check(message["content"].as_str().unwrap());
    let bounded = json!({"thinking_token_budget": 3, "chat_template_kwargs": {}});
    assert_eq!(ask(bounded).1, None, "there is no reasoning to end");
}

#[test]
fn other_requests_give_what_they_give_alone() {
    let server = TestServer::bundled();
    let free = |seed: u64| json!({"prompt": "The little dog", "max_tokens": 60, "temperature": 1.0, "seed": seed});
    let text = |body: &Value| post_ok(server.address, COMPLETIONS, body)["choices"][0]["text"].clone();
    let alone: Vec<Value> = (0..4).map(|seed| text(&free(seed))).collect();
    let constrained = |seed: u64| completion(json!({"structured_outputs": {"json": schema()}, "seed": seed}));
    let structured: Vec<Value> = (0..4).map(|seed| text(&constrained(seed))).collect();
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (alone, structured) = (&alone[seed as usize], &structured[seed as usize]);
            scope.spawn(move || assert_eq!(text(&free(seed)), *alone));
            scope.spawn(move || assert_eq!(text(&constrained(seed)), *structured));
        }
    });
    server.wait_idle();
}

#[test]
fn impossible_structures_are_refused_before_any_token() {
    let (server, control) = TestServer::replying("x");
    let regex = || json!({"regex": "a"});
    let schema = |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let tool = json!({"type": "function", "function": {"name": "f", "strict": true,
        "parameters": {"type": "object", "properties": {"a": {"type": "rocket"}}}}});
    for (path, body, field, expected) in [
        (
            COMPLETIONS,
            completion(json!({"response_format": schema(json!({"type": "rocket"}))})),
            "response_format",
            "rocket",
        ),
        (
            CHAT,
            chat(json!({"response_format": schema(json!({"if": {}, "type": "string"}))})),
            "response_format",
            "Unimpl",
        ),
        (
            COMPLETIONS,
            completion(json!({"structured_outputs": {"regex": "("}})),
            "structured_outputs",
            "cannot be used",
        ),
        (COMPLETIONS, completion(json!({"structured_outputs": {"grammar": "x"}})), "structured_outputs", "cannot be"),
        (COMPLETIONS, completion(json!({"structured_outputs": regex(), "min_tokens": 3})), "min_tokens", "combined"),
        (COMPLETIONS, completion(json!({"structured_outputs": regex(), "bad_words": ["a"]})), "bad_words", "combined"),
        (COMPLETIONS, completion(json!({"thinking_token_budget": 5})), "thinking_token_budget", "not implemented"),
        (CHAT, chat(json!({"thinking_token_budget": -1})), "thinking_token_budget", "from 0"),
        (
            CHAT,
            chat(json!({"thinking_token_budget": 5, "reasoning_effort": "low", "bad_words": ["a"]})),
            "bad_words",
            "thinking_token_budget",
        ),
        (COMPLETIONS, completion(json!({"guided_regex": "a"})), "guided_regex", "structured_outputs"),
        (
            CHAT,
            chat(json!({"structured_outputs": {"grammar": "start: \"a\""}, "tools": [tool]})),
            "structured_outputs",
            "cannot be combined with tools",
        ),
        // A forced call replaces the structure.
        (
            CHAT,
            chat(json!({"structured_outputs": regex(), "tools": [tool], "tool_choice": "required"})),
            "tools",
            "rocket",
        ),
        (CHAT, chat(json!({"tool_choice": "required", "tools": [tool]})), "tools", "rocket"),
    ] {
        let response = post(server.address, path, &body);
        let (status, error) = (response.status, response.json()["error"].clone());
        assert_eq!((status, &error["param"]), (400, &json!(field)), "{body}: {error}");
        assert!(error["message"].as_str().unwrap().contains(expected), "{error}");
    }
    assert_eq!(control.added(), 0);
}
