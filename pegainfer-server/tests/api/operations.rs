//! Operation of a server: API keys, origins, request ids, load, the prefix cache, tokenization.

use crate::support::client::{get, post, post_ok, post_unread, post_with, send};
use crate::support::mock::{Control, MockEngine};
use crate::support::{Setup, TestServer, tokenizer, wait_until};
use pegainfer_server::app::Options;
use pegainfer_server::http::{ApiKeys, Cors, Secret};
use pegainfer_server::limits::Limits;
use pegainfer_server::trace::{ChromeFiles, Tracer};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const COMPLETIONS: &str = "/v1/completions";

fn server(options: Options) -> (TestServer, Arc<Control>) {
    let (engine, control) = MockEngine::replying(" a cat");
    (TestServer::with(engine, options), control)
}

fn with_keys() -> Options {
    let keys = ["sk-one", "sk-two"].map(|key| Secret(key.into()));
    Options { api_keys: ApiKeys::load(&keys, None).unwrap(), ..Options::default() }
}

fn with_origins(origins: &[&str]) -> Options {
    let origins: Vec<String> = origins.iter().map(|origin| origin.to_string()).collect();
    Options { cors: Cors::new(&origins).unwrap(), ..Options::default() }
}

#[test]
fn a_caller_needs_a_key() {
    let (server, control) = server(with_keys());
    let body = json!({"prompt": "x"});
    let refused = post(server.address, COMPLETIONS, &body);
    assert_eq!((refused.status, refused.header("www-authenticate")), (401, Some("Bearer")));
    assert_eq!(refused.header("content-type"), Some("application/json"));
    let error = refused.json()["error"].clone();
    assert_eq!((&error["type"], &error["code"]), (&json!("invalid_request_error"), &json!("invalid_api_key")));
    for wrong in ["Bearer sk-three", "Bearer sk-on", "sk-one", "Basic sk-one"] {
        let refused = post_with(server.address, COMPLETIONS, ("Authorization", wrong), &body);
        assert_eq!(refused.status, 401, "{wrong}");
        assert!(!refused.text().contains("sk-"), "an response repeats a key");
    }
    assert_eq!(control.added(), 0);
    for right in ["Bearer sk-one", "bearer sk-two"] {
        assert_eq!(post_with(server.address, COMPLETIONS, ("Authorization", right), &body).status, 200, "{right}");
    }
    for path in ["/v1/models", "/load", "/version", "/nothing"] {
        assert_eq!(get(server.address, path).status, 401, "{path}");
    }
    for path in ["/health", "/live", "/ping", "/metrics"] {
        assert_eq!(get(server.address, path).status, 200, "{path} is open");
    }
}

#[test]
fn listed_origins_may_call() {
    let mut options = with_keys();
    options.cors = with_origins(&["https://a.example", "http://localhost:3000"]).cors;
    let (server, _) = server(options);
    let preflight = |origin: &str| {
        let headers = [
            ("Origin", origin),
            ("Access-Control-Request-Method", "POST"),
            ("Access-Control-Request-Headers", "authorization,content-type"),
        ];
        send(server.address, "OPTIONS", COMPLETIONS, &headers, b"")
    };
    let allowed = preflight("https://a.example");
    assert_eq!(allowed.status, 204, "a preflight carries no key");
    assert_eq!(allowed.header("access-control-allow-origin"), Some("https://a.example"));
    assert_eq!(allowed.header("access-control-allow-methods"), Some("GET, POST"));
    assert_eq!(allowed.header("access-control-allow-headers"), Some("authorization,content-type"));
    assert_eq!(allowed.header("vary"), Some("Origin"));
    let other = preflight("https://b.example");
    assert_eq!(other.header("access-control-allow-origin"), None);
    assert_eq!(other.header("access-control-allow-methods"), None);

    let refused = post_with(server.address, COMPLETIONS, ("Origin", "http://localhost:3000"), &json!({"prompt": "x"}));
    assert_eq!(refused.status, 401);
    let readable = refused.header("access-control-allow-origin");
    assert_eq!(readable, Some("http://localhost:3000"), "scripts of the origin may read why it was refused");
    assert!(refused.header("access-control-expose-headers").unwrap().contains("x-request-id"));
}

#[test]
fn a_star_allows_every_origin_and_the_default_none() {
    let body = json!({"prompt": "x"});
    let (any, _) = server(with_origins(&["*"]));
    let response = post_with(any.address, COMPLETIONS, ("Origin", "https://b.example"), &body);
    assert_eq!((response.status, response.header("access-control-allow-origin")), (200, Some("*")));
    let (none, _) = server(Options::default());
    let response = post_with(none.address, COMPLETIONS, ("Origin", "https://b.example"), &body);
    assert_eq!((response.status, response.header("access-control-allow-origin")), (200, None));
    assert_eq!(send(none.address, "OPTIONS", COMPLETIONS, &[], b"").status, 405);
}

#[test]
fn every_answer_carries_a_request_id() {
    let (server, _) = server(with_keys());
    let key = ("Authorization", "Bearer sk-one");
    let json = ("Content-Type", "application/json");
    let ask = |id: &str, body: &[u8]| {
        let response = send(server.address, "POST", COMPLETIONS, &[key, json, ("X-Request-Id", id)], body);
        (response.status, response.header("x-request-id").unwrap().to_string(), response.json())
    };
    let (status, id, response) = ask("run-7.a:1_b", br#"{"prompt": "x"}"#);
    assert_eq!((status, id.as_str(), &response["id"]), (200, "run-7.a:1_b", &json!("cmpl-run-7.a:1_b")));
    let (status, id, _) = ask("run-8", b"{");
    assert_eq!((status, id.as_str()), (400, "run-8"));
    for odd in ["two words", "<script>", "", &"x".repeat(129)] {
        let (status, id, response) = ask(odd, br#"{"prompt": "x"}"#);
        assert_eq!((status, id.len()), (200, 32), "{odd:?} is replaced");
        assert_eq!(response["id"], format!("cmpl-{id}"));
    }
    for path in ["/health", "/v1/models", "/nothing"] {
        assert_eq!(get(server.address, path).header("x-request-id").unwrap().len(), 32, "{path}");
    }
}

#[test]
fn load_tells_what_runs_and_waits() {
    let (engine, control) = MockEngine::replying(" a cat");
    control.allow(0);
    let server = TestServer::start(engine.with_max_num_seqs(2), Setup::default());
    let idle = json!({"server_load": 0, "running": 0, "waiting": 0, "kv_cache_free": 1.0});
    assert_eq!(get(server.address, "/load").json(), idle);
    let open = [(); 3].map(|()| post_unread(server.address, COMPLETIONS, &json!({"prompt": "x"})));
    wait_until("all are there", || control.added() == 3 && server.engine.stats().running == 2);
    let busy = json!({"server_load": 3, "running": 2, "waiting": 1, "kv_cache_free": 62.0 / 64.0});
    assert_eq!(get(server.address, "/load").json(), busy);
    drop(open);
    server.wait_idle();
    assert_eq!(get(server.address, "/load").json(), idle);
}

#[test]
fn the_prefix_cache_is_reset_on_request_only() {
    let (server, control) = server(Options { admin_local: true, ..Options::default() });
    assert_eq!(get(server.address, "/reset_prefix_cache").status, 405);
    assert_eq!(control.resets.load(Ordering::SeqCst), 0);
    assert_eq!(send(server.address, "POST", "/reset_prefix_cache", &[], b"").status, 200);
    assert_eq!(control.resets.load(Ordering::SeqCst), 1, "the reset is done before the response");
    control.panic.store(true, Ordering::SeqCst);
    control.allow(0);
    let fatal = post(server.address, COMPLETIONS, &json!({"prompt": "x"}));
    assert_eq!(fatal.status, 500);
    wait_until("the engine is dead", || get(server.address, "/health").status == 503);
    assert_eq!(send(server.address, "POST", "/reset_prefix_cache", &[], b"").status, 503);
}

fn ids(text: &str) -> Vec<u32> {
    tokenizer().encode(text, false).unwrap()
}

#[test]
fn tokenize_counts_a_prompt() {
    let (server, _) = server(Options::default());
    let response = post_ok(server.address, "/tokenize", &json!({"model": "tiny", "prompt": "a cat sat"}));
    let expected = ids("a cat sat");
    let shape = json!({"count": expected.len(), "max_model_len": 512, "tokens": expected, "token_strs": null});
    assert_eq!(response, shape);
    let body = json!({"prompt": "a cat<|im_end|>", "add_special_tokens": false, "return_token_strs": true});
    let response = post_ok(server.address, "/tokenize", &body);
    assert_eq!(response["token_strs"], json!(["a", "Ġcat", "<|im_end|>"]));
    assert_eq!(response["count"], 3);
}

#[test]
fn tokenize_counts_a_conversation_as_the_template_writes_it() {
    let (server, control) = server(Options::default());
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    let tokens = post_ok(server.address, "/tokenize", &chat)["tokens"].clone();
    post_ok(server.address, "/v1/chat/completions", &chat);
    assert_eq!(tokens, json!(*control.last().prompt), "what a chat request would run");
    let mut open = chat.clone();
    open["add_generation_prompt"] = json!(false);
    let response = post_ok(server.address, "/tokenize", &open);
    assert_eq!(response["tokens"], json!(ids("<|im_start|>user\nhi<|im_end|>\n")));
}

#[test]
fn a_text_is_measured_before_it_is_built() {
    let limits = Limits { max_response_bytes: 6000, ..Limits::default() };
    let (server, _) = server(Options { limits, ..Options::default() });
    let longest = ids(" caterpillars");
    assert_eq!(longest.len(), 1);
    let texts = |n: usize| post(server.address, "/detokenize", &json!({"tokens": vec![longest[0]; n]}));
    assert_eq!(texts(200).json()["prompt"], " caterpillars".repeat(200));
    let refused = texts(400);
    assert_eq!(refused.status, 400);
    let error = refused.json()["error"].clone();
    assert!(error["code"] == "response_too_large", "{error}");
    assert!(error["message"].as_str().unwrap().contains("(--max-response-bytes)"), "{error}");
}

#[test]
fn detokenize_is_the_inverse() {
    let (server, _) = server(Options::default());
    for text in ["a cat sat", "<|im_start|>user\nhé 日<|im_end|>", ""] {
        let response = post_ok(server.address, "/detokenize", &json!({"tokens": ids(text)}));
        assert_eq!(response, json!({ "prompt": text }));
    }
}

#[test]
fn bad_tokenize_requests_name_the_field() {
    let (server, _) = server(Options::default());
    let refusal = |path: &str, body: Value| {
        let response = post(server.address, path, &body);
        (response.status, response.json()["error"]["param"].as_str().map(str::to_string))
    };
    for (path, body, status, param) in [
        ("/tokenize", json!({}), 400, "prompt"),
        ("/tokenize", json!({"prompt": ["a"]}), 400, "prompt"),
        ("/tokenize", json!({"prompt": "a", "messages": []}), 400, "messages"),
        ("/tokenize", json!({"prompt": "a", "return_token_strs": 1}), 400, "return_token_strs"),
        ("/tokenize", json!({"prompt": "a", "model": "other"}), 404, "model"),
        ("/detokenize", json!({}), 400, "tokens"),
        ("/detokenize", json!({"tokens": [4096]}), 400, "tokens"),
        ("/detokenize", json!({"tokens": ["a"]}), 400, "tokens"),
    ] {
        assert_eq!(refusal(path, body.clone()), (status, Some(param.to_string())), "{path} {body}");
    }
}

/// The spans of the only trace file in a directory, by name.
fn spans(dir: &Path, name: &str) -> Vec<Value> {
    let file = std::fs::read_dir(dir).unwrap().next().unwrap().unwrap().path();
    let events: Vec<Value> = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    events.into_iter().filter(|event| event["name"] == name).collect()
}

#[test]
fn a_trace_has_the_stages_of_a_request_one_after_the_other() {
    let dir = std::env::temp_dir().join(format!("pegainfer-trace-{}", std::process::id()));
    let tracer = Tracer::start(vec![Box::new(ChromeFiles::create(&dir, 1 << 30).unwrap())], 0.0).unwrap();
    let (server, _) = server(Options { tracer: Some(tracer.clone()), admin_local: true, ..Options::default() });
    let body = json!({"prompt": "one two three four", "max_tokens": 7, "ignore_eos": true, "n": 2, "stream": true});
    assert_eq!(post_with(server.address, COMPLETIONS, ("x-trace", "yes"), &body).status, 400);
    assert_eq!(post(server.address, COMPLETIONS, &body).header("x-trace-id"), None, "none of them asked");
    let response = post_with(server.address, COMPLETIONS, ("x-trace", "1"), &body);
    let id = response.header("x-trace-id").unwrap().to_string();
    assert_eq!(response.events().len(), 14);
    server.wait_idle();
    wait_until("the trace is written", || {
        tracer.flush();
        !spans(&dir, COMPLETIONS).is_empty()
    });
    let root = spans(&dir, COMPLETIONS).remove(0);
    assert_eq!(root["args"]["trace_id"], id.as_str());
    let end = |span: &Value| span["ts"].as_f64().unwrap() + span["dur"].as_f64().unwrap();
    let choice = |name: &str| spans(&dir, name).into_iter().find(|span| span["args"]["choice"] == "1").unwrap();
    let stages: Vec<Value> = [spans(&dir, "receive").remove(0), spans(&dir, "tokenize").remove(0)]
        .into_iter()
        .chain(["queue", "prefill", "decode", "detokenize"].map(choice))
        .collect();
    for pair in stages.windows(2) {
        // A quarter microsecond is the last digit of times in microseconds since 1970.
        assert!(end(&pair[0]) <= pair[1]["ts"].as_f64().unwrap() + 0.5, "{pair:?}");
    }
    assert!(end(&stages[5]) <= end(&root) + 0.5);
    assert_eq!(
        (&stages[3]["args"]["cached_tokens"], &stages[4]["args"]["finish_reason"]),
        (&json!("2"), &json!("length"))
    );
    assert_eq!((spans(&dir, "token").len(), spans(&dir, "prefix hit").len()), (14, 2));
    for (path, prompt) in [
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "x"}]})),
        ("/v1/responses", json!({"input": "x", "store": false})),
        ("/v1/messages", json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 9})),
    ] {
        let before = spans(&dir, "decode").len();
        let response = post_with(server.address, path, ("x-trace", "1"), &prompt);
        assert_eq!(response.status, 200, "{path}");
        response.text();
        wait_until("the trace is written", || {
            tracer.flush();
            !spans(&dir, path).is_empty()
        });
        assert_eq!(spans(&dir, "decode").len(), before + 1, "{path}");
    }
    std::fs::remove_dir_all(dir).unwrap();
}
