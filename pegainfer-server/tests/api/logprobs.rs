//! Log-probabilities: their shapes, and large responses with them.

use crate::support::TestServer;
use crate::support::client::{post, post_ok, with};
use crate::support::mock::MockEngine;
use pegainfer_server::app::Options;
use pegainfer_server::limits::Limits;
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

#[test]
fn completion_logprobs() {
    let (server, _) = TestServer::replying(" a cat");
    let body = json!({"prompt": "x", "logprobs": 1, "max_tokens": 2});
    let plain = post_ok(server.address, COMPLETIONS, &body);
    let expected = json!({"text_offset": [0, 2], "token_logprobs": [-0.5, -0.5], "tokens": [" a", " cat"],
        "top_logprobs": [{" a": -0.5}, {" cat": -0.5}]});
    assert_eq!(plain["choices"][0]["logprobs"], expected);
    let events = post(server.address, COMPLETIONS, &with(body, json!({"stream": true}))).events();
    assert_eq!(events[1]["choices"][0]["logprobs"]["text_offset"], json!([2]));
    let none = post_ok(server.address, COMPLETIONS, &json!({"prompt": "x", "logprobs": 0, "max_tokens": 1}));
    assert_eq!(none["choices"][0]["logprobs"]["top_logprobs"], json!([{" a": -0.5}]), "the drawn token is listed");
}

#[test]
fn chat_logprobs() {
    let (server, _) = TestServer::replying("é");
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "logprobs": true, "top_logprobs": 2});
    let response = post_ok(server.address, CHAT, &body);
    let content = response["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let bytes: Vec<u64> = content[..content.len() - 1]
        .iter()
        .flat_map(|t| t["bytes"].as_array().unwrap().iter().map(|b| b.as_u64().unwrap()))
        .collect();
    assert_eq!(bytes, [0xC3, 0xA9]);
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(content.last().unwrap()["token"], "<|im_end|>", "every counted token is listed");
    assert_eq!(response["usage"]["completion_tokens"], content.len());
    let events = post(server.address, CHAT, &with(body, json!({"stream": true}))).events();
    assert_eq!(events[0]["choices"][0]["logprobs"], json!(null));
    assert_eq!(events[1]["choices"][0]["logprobs"]["content"][0], content[0]);
}

/// The lists of one choice of a streamed completion, joined.
fn joined(events: &[Value], index: usize) -> Value {
    let mut lists = json!({"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []});
    let choices = events.iter().filter_map(|event| event["choices"].get(0)).filter(|choice| choice["index"] == index);
    for choice in choices {
        for (name, list) in lists.as_object_mut().unwrap() {
            list.as_array_mut().unwrap().extend(choice["logprobs"][name].as_array().unwrap().clone());
        }
    }
    lists
}

#[test]
fn a_large_response_is_the_same_plain_and_streamed() {
    let server = TestServer::bundled();
    let prompt: Vec<usize> = (0..600).map(|i| 5 + i % 90).collect();
    let body = json!({"prompt": prompt, "n": 2, "echo": true, "logprobs": 20, "max_tokens": 60, "temperature": 0, "ignore_eos": true});
    // The first request computes the whole prompt, later ones only the part that is not in the prefix cache.
    post_ok(server.address, COMPLETIONS, &body);
    let plain = post_ok(server.address, COMPLETIONS, &body);
    let events = post(server.address, COMPLETIONS, &with(body.clone(), json!({"stream": true}))).events();
    for index in 0..2 {
        let whole = &plain["choices"][index]["logprobs"];
        assert_eq!(whole["tokens"].as_array().unwrap().len(), 660);
        assert_eq!(&joined(&events, index), whole);
    }

    let messages = json!([{"role": "user", "content": "Tell me a story."}]);
    let body = json!({"messages": messages, "logprobs": true, "top_logprobs": 20, "max_tokens": 200, "temperature": 0,
        "ignore_eos": true, "return_token_ids": true});
    let plain = post_ok(server.address, CHAT, &body);
    let events = post(server.address, CHAT, &with(body.clone(), json!({"stream": true}))).events();
    let streamed = |value: fn(&Value) -> &Value| -> Vec<Value> {
        let lists = events.iter().filter_map(|event| value(&event["choices"][0]).as_array());
        lists.flatten().cloned().collect()
    };
    let choice = &plain["choices"][0];
    assert_eq!(choice["token_ids"].as_array().unwrap().len(), 200);
    assert_eq!(choice["token_ids"], json!(streamed(|choice| &choice["token_ids"])));
    assert_eq!(choice["logprobs"]["content"], json!(streamed(|choice| &choice["logprobs"]["content"])));
}

#[test]
fn responses_together_stay_within_their_budget() {
    let limits = Limits { max_inflight_bytes: 1 << 20, ..Limits::default() };
    let server = TestServer::bundled_with(Options { limits, ..Options::default() });
    let ask = |max_tokens: usize| {
        let body = json!({"prompt": "x", "logprobs": 20, "max_tokens": max_tokens, "ignore_eos": true});
        post(server.address, COMPLETIONS, &body)
    };
    let refused = ask(1000);
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
    let error = refused.json()["error"].clone();
    let message = error["message"].as_str().unwrap();
    assert!(error["code"] == "server_overloaded" && message.contains("(--max-inflight-bytes)"), "{error}");
    server.wait_idle();
    let choice = ask(600).json()["choices"][0].clone();
    assert_eq!(choice["logprobs"]["top_logprobs"].as_array().unwrap().len(), 600, "the share was given back");

    let body = json!({"prompt": vec![5; 900], "echo": true, "logprobs": 20, "max_tokens": 1, "stream": true});
    let events = post(server.address, COMPLETIONS, &body).events();
    let [error] = &events[..] else { panic!("{events:?}") };
    assert_eq!(error["error"]["code"], "server_overloaded", "a chunk that is too large ends its stream");

    let tokens = post(server.address, "/detokenize", &json!({"tokens": vec![5; 2000]}));
    assert_eq!(tokens.status, 200);
}

#[test]
fn long_responses_of_every_chat_api_take_a_share_of_the_budget() {
    // At 16 bytes per token this exceeds the budget.
    const TOKENS: usize = 80_000;
    let limits = Limits { max_inflight_bytes: 1 << 20, ..Limits::default() };
    let engine = MockEngine::replying_ids(vec![5; TOKENS]).0.with_max_model_len(TOKENS + 1000);
    let server = TestServer::with(engine, Options { limits, ..Options::default() });
    let messages = json!([{"role": "user", "content": "x"}]);
    for (path, body) in [
        (CHAT, json!({"messages": messages, "max_tokens": TOKENS})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": TOKENS})),
        ("/v1/responses", json!({"input": "x", "max_output_tokens": TOKENS})),
    ] {
        let refused = post(server.address, path, &body);
        let status = refused.status;
        let text = refused.text();
        assert!(status == 503 && text.contains("(--max-inflight-bytes)"), "{path}: {status}");
        server.wait_idle();
    }
}
