//! End-to-end tests with the bundled checkpoint: HTTP, tokenizer, scheduler, CPU kernels.

use crate::support::client::{post, post_ok, with};
use crate::support::served::model_is_served;
use crate::support::{Setup, TestServer, model_dir, tokenizer};
use clap::Parser;
use pegainfer_models::args::EngineArgs;
use pegainfer_models::engine;
use pegainfer_server::cli::Cli;
use serde_json::{Value, json};
use std::path::Path;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn server(flags: &[&str]) -> TestServer {
    let args: EngineArgs = Cli::parse_from(["pegainfer"].iter().chain(flags)).serve.engine;
    let engine = engine::load(&model_dir(), &args).unwrap();
    TestServer::over(engine.handle, Setup { max_queued: 1024, ..Setup::default() })
}

fn fixture_cases() -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pegainfer-qwen3-4b/tests/fixtures/qwen3-tiny.json");
    let fixture: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    fixture["cases"].as_array().unwrap().clone()
}

/// Number of tokens before the first one with a margin within bf16 noise (see the README next to the fixture).
fn certain_tokens(case: &Value) -> usize {
    let margins = case["margins"].as_array().unwrap();
    margins.iter().take_while(|margin| margin.as_f64().unwrap() > 0.1).count()
}

#[test]
fn it_is_served_as_every_model() {
    model_is_served(&server(&[]));
}

#[test]
fn greedy_text_equals_the_reference_plain_and_streamed() {
    // One chunk of the stream for each token.
    greedy_text_equals_the_reference(&server(&[]), |events, tokens| assert_eq!(events, tokens));
}

#[test]
fn greedy_text_with_drafts_equals_the_reference() {
    let ngram = r#"{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
        "adaptive": false}"#;
    let server = server(&["--speculative-config", ngram]);
    greedy_text_equals_the_reference(&server, |events, tokens| assert!(events <= tokens));
    let stats = server.engine.stats().speculation;
    assert!(stats.draft_tokens > stats.accepted_tokens() && stats.accepted_tokens() > 0, "{stats:?}");
}

#[test]
fn structured_output_with_drafts_is_that_without() {
    let ngram = r#"{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
        "adaptive": false}"#;
    let (plain, drafting) = (server(&[]), server(&["--speculative-config", ngram]));
    let cat = json!({"type": "object", "required": ["name", "age"], "additionalProperties": false, "properties": {
        "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 1, "maximum": 30}}});
    let cats = json!({"type": "array", "items": cat, "minItems": 4, "maxItems": 4});
    let known = "[{\"name\": \"Tom\", \"age\": 3}, {\"name\": \"Kitty\", \"age\": 12}]";
    let tools = json!([{"type": "function", "function": {"name": "write", "parameters":
        {"type": "object", "required": ["cats"], "properties": {"cats": cats}, "additionalProperties": false}}}]);
    let messages = json!([{"role": "user", "content": format!("Write this list again: {known}")}]);
    let prompt = format!("{known} {known} ");
    let mut accepted = 0;
    for (path, body) in [
        (COMPLETIONS, json!({"prompt": prompt, "structured_outputs": {"json": cats}})),
        (COMPLETIONS, json!({"prompt": prompt, "structured_outputs": {"json": cats}, "logprobs": 2, "n": 2})),
        (CHAT, json!({"messages": messages, "tools": tools, "tool_choice": "required"})),
        (
            CHAT,
            json!({"messages": messages, "structured_outputs": {"json": cats},
            "chat_template_kwargs": {"enable_thinking": true}, "thinking_token_budget": 12}),
        ),
    ] {
        for temperature in [0.0, 0.8] {
            let body = with(body.clone(), json!({"temperature": temperature, "seed": 3, "max_tokens": 300}));
            let choices = |server: &TestServer| {
                let mut choices = post_ok(server.address, path, &body)["choices"].take();
                let calls = choices.pointer_mut("/0/message/tool_calls").and_then(Value::as_array_mut);
                // Call ids are random.
                calls.into_iter().flatten().for_each(|call| call["id"] = Value::Null);
                choices
            };
            assert_eq!(choices(&drafting), choices(&plain), "{path} {body}");
            let stats = drafting.engine.stats().speculation;
            assert!(stats.accepted_tokens() > accepted, "no draft was accepted: {path} {body}, {stats:?}");
            accepted = stats.accepted_tokens();
        }
    }
    assert_eq!(plain.engine.stats().speculation.drafts, 0);
    let (with_drafts, without) = (drafting.engine.stats(), plain.engine.stats().steps);
    println!("{} steps instead of {without}, {:?}", with_drafts.steps, with_drafts.speculation);
    assert!(with_drafts.steps < without, "{} steps, {without} without drafts", with_drafts.steps);
}

#[test]
fn drafts_by_layers_that_it_has_not_are_refused() {
    let mtp = r#"{"method": "mtp", "num_speculative_tokens": 2}"#;
    let args: EngineArgs = Cli::parse_from(["pegainfer", "--speculative-config", mtp]).serve.engine;
    let error = engine::load(&model_dir(), &args).err().unwrap().to_string();
    assert!(error.starts_with("--speculative-config: Qwen3 has no layers that draft"), "{error}");
}

/// Tests plain and streamed responses. `check_events` gets the chunks of a stream and its tokens.
fn greedy_text_equals_the_reference(server: &TestServer, check_events: impl Fn(usize, usize)) {
    let tokenizer = tokenizer();
    let mut compared = 0;
    for case in fixture_cases() {
        let certain = certain_tokens(&case);
        if certain == 0 {
            continue;
        }
        let ids: Vec<u32> = serde_json::from_value(case["greedy_ids"].clone()).unwrap();
        let expected = tokenizer.decode(&ids[..certain]);
        let mut body = json!({"prompt": case["prompt"], "max_tokens": certain, "temperature": 0, "ignore_eos": true});
        let plain = post_ok(server.address, COMPLETIONS, &body);
        assert_eq!(plain["choices"][0]["text"], expected, "{}", case["name"]);
        body["stream"] = true.into();
        let events = post(server.address, COMPLETIONS, &body).events();
        check_events(events.len(), certain);
        let streamed: String = events.iter().map(|e| e["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(streamed, expected, "{}", case["name"]);
        compared += certain;
    }
    assert!(compared > 100, "only {compared} tokens of the fixture are certain");
}

#[test]
fn two_hundred_streams_with_a_third_hanging_up_leak_nothing() {
    let server = server(&["--kv-cache-memory", "24M", "--max-num-seqs", "32"]);
    let total = server.engine.stats().kv_blocks_total;
    std::thread::scope(|scope| {
        for i in 0..200usize {
            let address = server.address;
            scope.spawn(move || {
                let body = json!({"prompt": format!("Story number {i}. Once upon a time"), "max_tokens": 48,
                    "ignore_eos": true, "stream": true, "seed": i, "temperature": 1.0});
                let mut response = post(address, COMPLETIONS, &body);
                if i % 3 == 0 {
                    for _ in 0..i % 7 {
                        response.chunk();
                    }
                    return;
                }
                let events = response.events();
                assert_eq!(events.len(), 48, "one chunk per token");
                assert_eq!(events[47]["choices"][0]["finish_reason"], "length");
            });
        }
    });
    server.wait_idle();
    let stats = server.engine.stats();
    assert_eq!((stats.running, stats.waiting, stats.kv_blocks_free), (0, 0, total));
    let response = post_ok(server.address, COMPLETIONS, &json!({"prompt": "Once", "max_tokens": 4, "temperature": 0}));
    assert_eq!(response["usage"]["completion_tokens"], 4);
}

#[test]
fn the_same_seed_gives_the_same_text_whatever_else_runs() {
    let server = server(&[]);
    let body =
        json!({"prompt": "Once upon a time", "max_tokens": 32, "seed": 11, "temperature": 1.0, "ignore_eos": true});
    let alone = post_ok(server.address, COMPLETIONS, &body)["choices"].clone();
    let mut batch = body.clone();
    batch["prompt"] = json!(["Once upon a time", "The dog", "One day a boy", "Once upon a time"]);
    let together = post_ok(server.address, COMPLETIONS, &batch);
    for index in [0, 3] {
        assert_eq!(together["choices"][index]["text"], alone[0]["text"]);
    }
}
