//! Qwen3.5 behind the API: detection, chat, reasoning, tools, prefix cache, plan, and the refusal without a GPU.

use crate::support::client::{get, post, post_ok};
use crate::support::served::model_is_served;
use crate::support::{Setup, TestServer};
use clap::Parser;
use pegainfer_models::args::EngineArgs;
use pegainfer_models::engine;
use pegainfer_runtime::Overrides;
use pegainfer_server::cli::Cli;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const CHAT: &str = "/v1/chat/completions";

fn tiny() -> PathBuf {
    crate::support::model_dir().with_file_name("qwen35-tiny")
}

fn args(flags: &[&str]) -> EngineArgs {
    Cli::parse_from(["pegainfer"].iter().chain(flags)).serve.engine
}

fn server() -> TestServer {
    server_with(&[])
}

fn server_with(flags: &[&str]) -> TestServer {
    let engine = engine::load(&tiny(), &args(&[&["--device", "cpu"], flags].concat())).unwrap();
    assert_eq!(engine.family, "Qwen3.5");
    TestServer::over(engine.handle, Setup { max_queued: 1024, model_dir: tiny(), ..Setup::default() })
}

/// The fixture's chats that end and whose tokens are all outside bf16 noise.
fn chats() -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pegainfer-qwen35-4b/tests/fixtures/qwen35-tiny.json");
    let fixture: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let cases = fixture["cases"].as_array().unwrap().iter();
    cases.filter(|case| case["kind"] == "chat" && case["first_eos"].is_u64()).cloned().collect()
}

#[test]
fn chats_answer_as_the_reference_plain_and_streamed() {
    chats_answer_as_the_reference(&server());
}

#[test]
fn chats_with_drafts_answer_as_the_reference() {
    let ngram = r#"{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1,
        "adaptive": false}"#;
    let server = server_with(&["--speculative-config", ngram]);
    chats_answer_as_the_reference(&server);
    let stats = server.engine.stats().speculation;
    assert!(stats.draft_tokens > stats.accepted_tokens() && stats.accepted_tokens() > 0, "{stats:?}");
}

/// Dummy weights: neither text nor drafts mean anything.
#[test]
fn drafts_of_the_model_change_no_text() {
    let mtp = r#"{"method": "mtp", "num_speculative_tokens": 2, "adaptive": false}"#;
    let texts =
        [&["--load-format", "dummy"][..], &["--load-format", "dummy", "--speculative-config", mtp]].map(|flags| {
            let server = server_with(flags);
            let choices = [0.0, 1.0].map(|temperature| {
                let body = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24, "seed": 5,
                "temperature": temperature, "ignore_eos": true});
                post_ok(server.address, CHAT, &body)["choices"].clone()
            });
            (choices, server.engine.stats().speculation.drafts)
        });
    assert_eq!(texts[0].0, texts[1].0);
    assert!(texts[0].1 == 0 && texts[1].1 > 20, "{texts:?}");
}

fn chats_answer_as_the_reference(server: &TestServer) {
    let tokenizer = pegainfer_text::Tokenizer::load(&tiny()).unwrap();
    let (mut texts, mut calls) = (0, 0);
    for case in chats() {
        let ids: Vec<u32> = serde_json::from_value(case["greedy_ids"].clone()).unwrap();
        let expected = tokenizer.decode(&ids[..case["first_eos"].as_u64().unwrap() as usize]);
        let mut body = json!({"messages": case["messages"], "max_tokens": 64, "temperature": 0});
        if !case["tools"].is_null() {
            body["tools"] = case["tools"].clone();
        }
        let response = post_ok(server.address, CHAT, &body);
        let choice = &response["choices"][0];
        let prompt = case["prompt_ids"].as_array().unwrap().len();
        assert_eq!(response["usage"]["prompt_tokens"], prompt, "{}: another prompt", case["name"]);
        if body["tools"].is_null() {
            assert_eq!(choice["message"]["content"], expected, "{}", case["name"]);
            assert_eq!(choice["finish_reason"], "stop");
            body["stream"] = true.into();
            let events = post(server.address, CHAT, &body).events();
            let deltas = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
            assert_eq!(deltas.collect::<String>(), expected, "{}", case["name"]);
            texts += 1;
        } else {
            let call = &choice["message"]["tool_calls"][0]["function"];
            assert_eq!((&call["name"], &call["arguments"]), (&json!("get_weather"), &json!("{\"city\": \"Oslo\"}")));
            assert_eq!(choice["finish_reason"], "tool_calls");
            calls += 1;
        }
    }
    assert!(texts >= 3 && calls >= 1, "the fixture tests nothing");
}

#[test]
fn reasoning_is_requested_and_parsed() {
    let server = server();
    let mut body = json!({"messages": [{"role": "user", "content": "What is the capital of Norway?"}],
        "max_tokens": 80, "temperature": 0});
    let plain = post_ok(server.address, CHAT, &body)["choices"][0]["message"].clone();
    assert!(plain["reasoning"].is_null() && plain["content"].as_str().unwrap().contains("Oslo"), "{plain}");
    body["chat_template_kwargs"] = json!({"enable_thinking": true});
    let thinking = post_ok(server.address, CHAT, &body)["choices"][0]["message"].clone();
    let reasoning = thinking["reasoning"].as_str().unwrap();
    assert!(!reasoning.is_empty() && !reasoning.contains("think>"), "{thinking}");
    assert!(thinking["content"].as_str().unwrap().contains("Oslo"), "{thinking}");
}

#[test]
fn it_is_served_as_every_model() {
    let server = server();
    model_is_served(&server);
    let models = get(server.address, "/v1/models").json();
    assert_eq!(models["data"][0]["max_model_len"], 4096, "{models}");
}

#[test]
fn the_plan_needs_no_weights() {
    let records = engine::record(&tiny(), &Overrides::default(), 2, 1, 100).unwrap();
    assert!(["decode_delta", "gated_decode_attention"].iter().all(|op| records.iter().any(|r| r.op == *op)));
    let loaded = engine::load(&tiny(), &args(&["--device", "cpu", "--load-format", "dummy"])).unwrap();
    assert!(loaded.device.starts_with("cpu"), "{}", loaded.device);
}
