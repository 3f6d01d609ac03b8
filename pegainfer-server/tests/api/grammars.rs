//! Grammars of hostile clients, through every field of the API, and the process that tries them.

use crate::support::TestServer;
use crate::support::attack::AttackedServer;
use crate::support::client::{post, post_ok, post_unread};
use crate::support::mock::MockEngine;
use crate::support::process::pegainfer;
use pegainfer_server::app::Options;
use pegainfer_server::text_service::{GrammarLimits, GrammarTrial};
use serde_json::{Value, json};
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Output, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A text that has to match `count` patterns. With 24 of them, 1 KB, llguidance alone would never end.
fn patterns(count: u8) -> Value {
    let pattern = |letter: u8| json!({"type": "string", "pattern": format!(".*{}.*", letter as char)});
    json!({"allOf": (b'a'..b'a' + count).map(pattern).collect::<Vec<_>>()})
}

/// An object of optional properties whose names begin with `prefix`.
fn optional(count: usize, prefix: &str) -> Value {
    let property = |i: usize| (format!("{prefix}{i}"), json!({"type": "integer"}));
    json!({"type": "object", "properties": (0..count).map(property).collect::<serde_json::Map<_, _>>()})
}

/// A request through each field that accepts a schema.
fn doors(schema: &Value) -> Vec<(&'static str, Value)> {
    let messages = json!([{"role": "user", "content": "x"}]);
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
    let object = json!({"type": "object", "properties": {"a": schema}, "required": ["a"]});
    let function = json!({"name": "f", "parameters": object});
    let strict = json!({"name": "f", "parameters": object, "strict": true});
    let flat = json!({"type": "function", "name": "f", "parameters": object});
    let tool = json!({"name": "f", "input_schema": object});
    let text = json!({"format": {"type": "json_schema", "name": "a", "schema": schema}});
    let lark = format!("start: \"a\" %json {schema}");
    let chat = "/v1/chat/completions";
    vec![
        ("/v1/completions", json!({"prompt": "x", "response_format": format})),
        ("/v1/completions", json!({"prompt": "x", "structured_outputs": {"json": schema}})),
        ("/v1/completions", json!({"prompt": "x", "structured_outputs": {"json": schema.to_string()}})),
        ("/v1/completions", json!({"prompt": "x", "structured_outputs": {"grammar": lark}})),
        (chat, json!({"messages": messages, "response_format": format})),
        (
            chat,
            json!({"messages": messages, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}),
        ),
        (
            chat,
            json!({"messages": messages, "tools": [{"type": "function", "function": strict}], "tool_choice": "required"}),
        ),
        (
            chat,
            json!({"messages": messages, "response_format": {"type": "json_object"},
            "tools": [{"type": "function", "function": function}]}),
        ),
        ("/v1/responses", json!({"input": "x", "text": text})),
        ("/v1/responses", json!({"input": "x", "tools": [flat], "tool_choice": "required"})),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 5, "tools": [tool], "tool_choice": {"type": "any"}}),
        ),
    ]
}

/// Options with the trial of the real program.
fn options() -> Options {
    let limits = GrammarLimits { memory: 256 << 20, time: Duration::from_secs(1) };
    let program = env!("CARGO_BIN_EXE_pegainfer").into();
    Options { grammar_trial: Some(GrammarTrial { program, limits }), ..Options::default() }
}

#[test]
fn every_door_refuses_what_would_never_end() {
    // Templates show tools. The prompt has to fit the context, so that the grammar is refused.
    let engine = MockEngine::replying("1").0.with_max_model_len(1 << 20);
    let server = TestServer::with(engine, options());
    for (path, body) in doors(&patterns(24)) {
        let began = Instant::now();
        let response = post(server.address, path, &body);
        let (status, error) = (response.status, response.text());
        assert_eq!(status, 400, "{path}: {error}");
        assert!(error.contains("make more than 1048576 combinations"), "{path}: {error}");
        assert!(began.elapsed() < Duration::from_secs(1), "{path}: {:?}", began.elapsed());
    }
    for (path, body) in doors(&optional(10_000, "p")) {
        let response = post(server.address, path, &body);
        let (status, error) = (response.status, response.text());
        assert_eq!(status, 400, "{path}: {error}");
        assert!(error.contains("properties") || error.contains("bytes, at most"), "{path}: {error}");
    }
}

#[test]
fn tried_grammars_can_be_used() {
    let server = TestServer::bundled_with(options());
    // Objects of 500 properties and more used to cause a 500.
    for count in [3, 500, 1000] {
        let body = json!({"prompt": "x", "max_tokens": 8, "structured_outputs": {"json": optional(count, "p")}});
        let text =
            post_ok(server.address, "/v1/completions", &body)["choices"][0]["text"].as_str().unwrap().to_string();
        assert!(text.starts_with('{'), "{count}: {text:?}");
    }
    let body = json!({"prompt": "x", "structured_outputs": {"choice": ["yes"]}});
    for _ in 0..3 {
        assert_eq!(post_ok(server.address, "/v1/completions", &body)["choices"][0]["text"], "yes");
    }
    // Fuel ends it at the first or a later token, as an error of the request, not of the server.
    let terms: Vec<String> = (b'a'..=b'x').map(|letter| format!("/.*{}.*/", letter as char)).collect();
    let lark = format!("start: A\nA: {}", terms.join(" & "));
    let body = json!({"prompt": "x", "structured_outputs": {"grammar": lark}});
    assert_eq!(post(server.address, "/v1/completions", &body).status, 400);
    let wrong = json!({"prompt": "x", "structured_outputs": {"regex": "("}});
    assert_eq!(post(server.address, "/v1/completions", &wrong).status, 400);
}

#[test]
fn a_grammar_that_fails_at_a_later_token_is_an_error_of_its_request() {
    let (engine, control) = MockEngine::replying(" one two three");
    let server = TestServer::with(engine, options());
    let (messages, schema) = (json!([{"role": "user", "content": "x"}]), json!({"type": "string"}));
    let outputs = json!({"json": schema});
    let format = json!({"format": {"type": "json_schema", "name": "a", "schema": schema}});
    for (path, body, event) in [
        ("/v1/completions", json!({"prompt": "x", "structured_outputs": outputs}), "data: {\"error\""),
        ("/v1/chat/completions", json!({"messages": messages, "structured_outputs": outputs}), "data: {\"error\""),
        ("/v1/responses", json!({"input": "x", "text": format}), "event: response.failed"),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 99, "output_config": format}), "event: error"),
    ] {
        for stream in [false, true] {
            control.tokens.store(0, Ordering::SeqCst);
            control.allow(2);
            control.fail_grammars.store(true, Ordering::SeqCst);
            let mut body = body.clone();
            body["stream"] = stream.into();
            let response = post(server.address, path, &body);
            let (status, text) = (response.status, response.text());
            assert_eq!(status, if stream { 200 } else { 400 }, "{path}: {text}");
            assert!(text.contains("the grammar of the request cannot be followed: no token may come next"), "{text}");
            let reason = match (path, stream) {
                // Anthropic's errors have a type instead of a code.
                ("/v1/messages", _) => "invalid_request_error",
                ("/v1/responses", true) => "invalid_prompt",
                _ => "grammar_failed",
            };
            assert!(text.contains(&format!("\"{reason}\"")) && (!stream || text.contains(event)), "{path}: {text}");
            server.wait_idle();
        }
    }
}

/// Runs the hidden command on a grammar that [`patterns`] describes.
fn tried(lark: &str, memory: u64, seconds: u64) -> Output {
    let mut command = pegainfer();
    command.args(["compile-grammar", &memory.to_string(), &seconds.to_string()]).env("RUST_BACKTRACE", "0");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(lark.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn the_process_that_tries_ends_itself() {
    let good = tried("start: \"a\"", 1 << 20, 1);
    assert!(String::from_utf8(good.stdout).unwrap().starts_with("ok "), "{:?}", good.status);
    let wrong = tried("begin: \"a\"", 1 << 20, 1);
    assert!(String::from_utf8(wrong.stdout).unwrap().starts_with("error "), "{:?}", wrong.status);
    let [killed, xcpu, abort] = [9, 24, 6];
    let long = tried(&format!("start: %json {}", patterns(24)), 4 << 30, 1);
    assert!([killed, xcpu].contains(&long.status.signal().unwrap()), "{:?}", long.status);
    let large = tried(&format!("start: %json {}", patterns(17)), 0, 60);
    assert_eq!(large.status.signal(), Some(abort), "{:?}", large.status);
    let deep = (0..40_000).map(|i| format!("r{i}:r{}\n", i + 1)).collect::<String>() + "start:r0\nr40000:\"a\"";
    let deep = tried(&deep, 256 << 20, 10);
    assert_eq!(deep.status.signal(), Some(abort), "a stack overflow: {:?}", deep.status);
}

#[test]
fn ordinary_clients_do_not_notice_hostile_grammars() {
    let mut target = AttackedServer::start(&[]);
    target.attack("four bombs at once, through every door", |address| {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for (path, body) in doors(&patterns(24)) {
                        assert_eq!(post(address, path, &body).status, 400, "{path}");
                    }
                });
            }
        });
    });
    target.attack("32 clients hang up while their grammar is compiled", |address| {
        for i in 0..32 {
            // Most would never end; some are large and legal.
            let schema = if i % 4 > 0 { patterns(24) } else { optional(400, &format!("p{i}x")) };
            let body = json!({"prompt": "x", "max_tokens": 1, "structured_outputs": {"json": schema}});
            let stream = post_unread(address, "/v1/completions", &body);
            std::thread::sleep(Duration::from_millis(20));
            drop(stream);
        }
    });
    target.attack("large legal schemas, four at the same time, and some that are too large", |address| {
        std::thread::scope(|scope| {
            for i in 0..4 {
                scope.spawn(move || {
                    let schema = optional(500, &format!("q{i}x"));
                    let body = json!({"prompt": "x", "max_tokens": 4, "structured_outputs": {"json": schema}});
                    assert_eq!(post(address, "/v1/completions", &body).status, 200);
                    let schema = optional(10_000, &format!("q{i}x"));
                    let body = json!({"prompt": "x", "max_tokens": 4, "structured_outputs": {"json": schema}});
                    assert_eq!(post(address, "/v1/completions", &body).status, 400);
                });
            }
        });
    });
}
