//! Server behaviour that does not depend on the model's output, checked for every model.

use super::TestServer;
use super::client::{post, post_ok, with};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// All checks.
pub fn model_is_served(server: &TestServer) {
    completions_agree_plain_and_streamed(server);
    chats_agree_plain_and_streamed(server);
    logprobs_are_probabilities(server);
    a_repeated_prompt_is_cached(server);
    server.wait_idle();
    let stats = server.engine.stats();
    assert_eq!((stats.running, stats.kv_blocks_free), (0, stats.kv_blocks_total));
}

fn completions_agree_plain_and_streamed(server: &TestServer) {
    let body = json!({"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": true});
    let plain = post_ok(server.address, COMPLETIONS, &body);
    let choice = &plain["choices"][0];
    assert_eq!((&choice["finish_reason"], &plain["usage"]["completion_tokens"]), (&json!("length"), &json!(24)));
    let events = post(server.address, COMPLETIONS, &with(body, json!({"stream": true}))).events();
    assert_eq!(events.len(), 24, "one chunk for each token");
    let streamed: String = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(choice["text"], streamed);
}

fn chats_agree_plain_and_streamed(server: &TestServer) {
    let messages = json!([{"role": "user", "content": "What is the capital of France?"}]);
    let body = json!({"messages": messages, "max_tokens": 16, "temperature": 0});
    let plain = post_ok(server.address, CHAT, &body)["choices"][0].clone();
    let events = post(server.address, CHAT, &with(body, json!({"stream": true}))).events();
    let deltas = |field: &str| -> String {
        events.iter().filter_map(|event| event["choices"][0]["delta"][field].as_str()).collect()
    };
    assert_eq!(plain["message"]["content"].as_str().unwrap_or_default(), deltas("content"));
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], plain["finish_reason"]);
}

fn logprobs_are_probabilities(server: &TestServer) {
    let body = json!({"prompt": "Once", "max_tokens": 6, "temperature": 0, "logprobs": 3, "ignore_eos": true});
    let logprobs = post_ok(server.address, COMPLETIONS, &body)["choices"][0]["logprobs"].clone();
    let drawn = logprobs["token_logprobs"].as_array().unwrap();
    assert_eq!(drawn.len(), 6);
    for (drawn, top) in drawn.iter().zip(logprobs["top_logprobs"].as_array().unwrap()) {
        let top: Vec<f64> = top.as_object().unwrap().values().map(|p| p.as_f64().unwrap()).collect();
        let best = top.iter().copied().fold(f64::MIN, f64::max);
        assert_eq!(drawn.as_f64().unwrap(), best, "a greedy token is the most likely one");
        let sum: f64 = top.iter().map(|p| p.exp()).sum();
        assert!(sum > 0.0 && sum < 1.0 + 1e-3, "{top:?}");
    }
}

fn a_repeated_prompt_is_cached(server: &TestServer) {
    let prompt = vec!["The dog and the cat went to the park."; 20].join(" ");
    let body = json!({"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 2, "ignore_eos": true});
    let [cold, warm] = [0, 1].map(|_| post_ok(server.address, COMPLETIONS, &body));
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let block = server.engine.limits().block_size as u64;
    let prompt = cold["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!((cached(&cold), cached(&warm)), (0, (prompt - 1) / block * block), "of {prompt} tokens");
    assert_eq!(cold["choices"], warm["choices"], "a prefix hit changed the answer");
}
