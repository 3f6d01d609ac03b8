//! Calls as models write them, over HTTP: each case of `fixtures/calls` in each API, plain and streamed.

use super::Agents;
use super::answer::Answer;
use super::recorded::Api;
use super::template::Template;
use crate::support::client::post;
use serde_json::{Value, json};

const APIS: [(Api, &str); 3] =
    [(Api::Chat, "/v1/chat/completions"), (Api::Messages, "/v1/messages"), (Api::Responses, "/v1/responses")];

fn cases(format: &str) -> Vec<Value> {
    let cases: Vec<Value> = serde_json::from_str(include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../pegainfer-text/tests/fixtures/calls/cases.json"
    )))
    .unwrap();
    // Answers that a limit cuts off have other shapes.
    cases.into_iter().filter(|case| case["format"] == format && case["end"] == "eos").collect()
}

/// The request of a case.
fn body(api: Api, case: &Value) -> Value {
    let thinks = case["thinking"] == true;
    let functions = case["tools"].as_array().unwrap().iter().map(|tool| tool["function"].clone());
    let messages = json!([{"role": "user", "content": "Go on."}]);
    match api {
        Api::Chat => json!({"messages": messages, "tools": case["tools"], "max_tokens": 4096,
            "chat_template_kwargs": {"enable_thinking": thinks}}),
        Api::Messages => {
            let tool = |function: Value| json!({"name": function["name"], "input_schema": function["parameters"]});
            let thinking = if thinks { json!({"type": "adaptive"}) } else { json!({"type": "disabled"}) };
            json!({"messages": messages, "tools": functions.map(tool).collect::<Vec<_>>(), "max_tokens": 4096,
                "thinking": thinking})
        }
        Api::Responses => {
            let tool = |mut function: Value| {
                function["type"] = "function".into();
                function
            };
            json!({"input": "Go on.", "tools": functions.map(tool).collect::<Vec<_>>(), "max_output_tokens": 4096,
                "reasoning": {"effort": if thinks { "low" } else { "none" }}})
        }
    }
}

fn ask(agents: &Agents, api: Api, path: &str, case: &Value, stream: bool) -> Answer {
    let text = case["text"].as_str().unwrap().to_owned();
    agents.control.script(move |_| text);
    let mut body = body(api, case);
    body["stream"] = stream.into();
    if api == Api::Chat && stream {
        body["stream_options"] = json!({"include_usage": true});
    }
    let response = post(agents.server.address, path, &body);
    let (status, text) = (response.status, response.text());
    assert_eq!(status, 200, "{text}");
    if stream { Answer::from_stream(api, &text) } else { Answer::from_response(api, &text) }
}

/// True if two values are equal, with numbers compared by value.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| same(a, b)))
        }
        (a, b) => a == b,
    }
}

fn fits(case: &Value, changes: &Value, answer: &Answer) -> bool {
    let field = |name: &str| changes.get(name).unwrap_or(&case["expect"][name]);
    let text = |name: &str| field(name).as_str().unwrap_or_default();
    let calls = field("calls").as_array().unwrap();
    let equal = answer
        .calls
        .iter()
        .zip(calls)
        .all(|(call, expected)| call.name == expected["name"] && same(&call.input, &expected["arguments"]));
    equal
        && answer.calls.len() == calls.len()
        && answer.content == text("content")
        && answer.reasoning == text("reasoning")
        && answer.ended_with_calls == (field("finish") == "tool_calls")
}

/// Requests all cases of a format in all APIs; the same accepted answer has to fit every API.
fn every_api_gives_what_the_model_meant(template: Template, format: &str, min_cases: usize) {
    let agents = Agents::start(template);
    let cases = cases(format);
    assert!(cases.len() >= min_cases, "{} cases", cases.len());
    let mut wrong = vec![];
    for case in cases {
        let asked = APIS.iter().flat_map(|(api, path)| [(api, path, false), (api, path, true)]);
        let answers: Vec<Answer> = asked.map(|(api, path, stream)| ask(&agents, *api, path, &case, stream)).collect();
        let accepted = std::iter::once(json!({})).chain(case["also"].as_array().cloned().into_iter().flatten());
        if !accepted.into_iter().any(|changes| answers.iter().all(|answer| fits(&case, &changes, answer))) {
            wrong.push(format!("{}: {answers:#?}", case["name"]));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn json_calls_in_every_api() {
    every_api_gives_what_the_model_meant(Template::json(), "qwen3", 15);
}

#[test]
fn tagged_calls_in_every_api() {
    every_api_gives_what_the_model_meant(Template::tags(), "qwen35", 30);
}

#[test]
fn dsml_calls_in_every_api() {
    every_api_gives_what_the_model_meant(Template::dsml(), "dsv4", 10);
}
