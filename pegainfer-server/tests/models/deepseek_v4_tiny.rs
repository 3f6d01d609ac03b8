//! End-to-end tests with the small DeepSeek-V4 checkpoint, and DeepSeek's own chat encoding over HTTP.

use crate::support::client::{post, post_ok};
use crate::support::mock::MockEngine;
use crate::support::{Setup, TestServer};
use clap::Parser;
use pegainfer_models::args::EngineArgs;
use pegainfer_models::engine;
use pegainfer_server::cli::Cli;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn dsv4_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/dsv4-tiny-fp4fp8")
}

fn server() -> TestServer {
    let args: EngineArgs = Cli::parse_from(["pegainfer", "--max-model-len", "1024"]).serve.engine;
    let engine = engine::load(&dsv4_dir(), &args).unwrap();
    TestServer::over(engine.handle, Setup { model_dir: dsv4_dir(), max_queued: 1024, ..Setup::default() })
}

fn text(response: &Value) -> String {
    response["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn completions_and_chats_are_served_plain_and_streamed() {
    let server = server();
    let mut body = json!({"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": true});
    let plain = post_ok(server.address, COMPLETIONS, &body);
    assert_eq!(plain["usage"]["completion_tokens"], 24);
    body["stream"] = true.into();
    let events = post(server.address, COMPLETIONS, &body).events();
    let streamed: String = events.iter().map(|e| e["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(plain["choices"][0]["text"], streamed);
    let ask = |question: &str| {
        let body = json!({"messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0});
        text(&post_ok(server.address, CHAT, &body))
    };
    assert!(ask("What is the capital of Norway?").contains("Oslo"));
    server.wait_idle();
    let stats = server.engine.stats();
    assert_eq!((stats.running, stats.kv_blocks_free), (0, stats.kv_blocks_total));
}

#[test]
fn twenty_streams_with_a_third_hanging_up_leak_nothing() {
    let server = server();
    std::thread::scope(|scope| {
        for i in 0..20usize {
            let address = server.address;
            scope.spawn(move || {
                let body = json!({"prompt": format!("Story number {i}. Once upon a time"), "max_tokens": 12,
                    "ignore_eos": true, "stream": true, "seed": i, "temperature": 1.0});
                let mut response = post(address, COMPLETIONS, &body);
                if i % 3 == 0 {
                    response.chunk();
                    return;
                }
                assert_eq!(response.events().len(), 12, "one chunk per token");
            });
        }
    });
    server.wait_idle();
    let stats = server.engine.stats();
    assert_eq!((stats.running, stats.waiting, stats.kv_blocks_free), (0, 0, stats.kv_blocks_total));
}

#[test]
fn drafts_are_served_and_those_of_a_missing_layer_refused() {
    let load = |config: &str| {
        let args: EngineArgs = Cli::parse_from(["pegainfer", "--speculative-config", config]).serve.engine;
        engine::load(&dsv4_dir(), &args)
    };
    let loaded = load(r#"{"method": "ngram", "num_speculative_tokens": 2}"#).unwrap();
    assert_eq!(loaded.handle.limits().num_speculative_tokens, Some(2));
    let error = load(r#"{"method": "mtp", "num_speculative_tokens": 2}"#).err().unwrap().to_string();
    assert!(error.starts_with("--speculative-config: config.json has no layers that draft"), "{error}");
}

/// A directory like the official one: a tokenizer without a chat template.
struct Official(PathBuf);

impl Official {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("pegainfer-dsv4-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        for file in ["tokenizer.json", "config.json"] {
            std::fs::copy(dsv4_dir().join(file), dir.join(file)).unwrap();
        }
        Self(dir)
    }

    fn server(&self, reply: &str) -> TestServer {
        let (engine, _) = MockEngine::replying(reply);
        // The prompt's text about tools is long.
        let engine = engine.with_max_model_len(1024);
        TestServer::start(engine, Setup { model_dir: self.0.clone(), ..Setup::default() })
    }
}

impl Drop for Official {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn reasoning_and_calls_come_as_fields() {
    let official = Official::new("calls");
    let server = official.server(
        "I should look.</think>One moment.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"weather\">\n\
         <｜DSML｜parameter name=\"city\" string=\"true\">Zürich</｜DSML｜parameter>\n\
         <｜DSML｜parameter name=\"days\" string=\"false\">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    );
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}});
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "tools": [tool],
        "chat_template_kwargs": {"thinking": true}});
    let choice = post_ok(server.address, CHAT, &body)["choices"][0].clone();
    let message = &choice["message"];
    assert_eq!((&message["reasoning"], &message["content"]), (&json!("I should look."), &json!("One moment.")));
    let function = &message["tool_calls"][0]["function"];
    assert_eq!(*function, json!({"name": "weather", "arguments": "{\"city\": \"Zürich\", \"days\": 2}"}));
    assert_eq!(choice["finish_reason"], "tool_calls");
}

#[test]
fn the_prompt_is_deepseeks_own() {
    let official = Official::new("prompt");
    let server = official.server("hello");
    let rendered = |kwargs: Value| {
        let body = json!({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}],
            "chat_template_kwargs": kwargs});
        let ids = post_ok(server.address, "/tokenize", &body)["tokens"].clone();
        post_ok(server.address, "/detokenize", &json!({"tokens": ids}))["prompt"].as_str().unwrap().to_owned()
    };
    assert_eq!(rendered(json!({})), "<｜begin▁of▁sentence｜>S<｜User｜>hi<｜Assistant｜></think>");
    assert_eq!(rendered(json!({"thinking": true})), "<｜begin▁of▁sentence｜>S<｜User｜>hi<｜Assistant｜><think>");
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1,
        "chat_template_kwargs": {"reasoning_effort": "max"}});
    let refused = post(server.address, CHAT, &body);
    assert_eq!(refused.status, 400);
    let error = refused.json()["error"]["message"].to_string();
    assert!(error.contains("put encoding/encoding_dsv4.py"), "{error}");
}

#[test]
fn the_text_of_a_reasoning_effort_comes_from_the_models_directory() {
    let official = Official::new("effort");
    std::fs::create_dir_all(official.0.join("encoding")).unwrap();
    let source = "x = 1\nREASONING_EFFORT_MAX = (\n    \"Think \"\n    \"well.\\n\"\n)\n";
    std::fs::write(official.0.join("encoding/encoding_dsv4.py"), source).unwrap();
    let server = official.server("hello");
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "max"});
    let ids = post_ok(server.address, "/tokenize", &body)["tokens"].clone();
    let prompt = post_ok(server.address, "/detokenize", &json!({"tokens": ids}))["prompt"].clone();
    assert_eq!(prompt, "<｜begin▁of▁sentence｜>Think well.\n<｜User｜>hi<｜Assistant｜><think>");
}
