//! API keys as tenants: fair shares of the queue, the prefix cache and the server.

use crate::support::client::{Response, post, post_with};
use crate::support::mock::{Control, MockEngine};
use crate::support::temp_dir::TempDir;
use crate::support::{TestServer, wait_until};
use pegainfer_server::app::Options;
use pegainfer_server::http::{ApiKeys, Secret, TrustedProxies};
use pegainfer_server::limits::Limits;
use pegainfer_server::text_service::{GrammarLimits, GrammarTrial};
use serde_json::{Value, json};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

const COMPLETIONS: &str = "/v1/completions";

/// A server with the keys `alpha` and `beta`.
fn server(limits: Limits) -> (TestServer, Arc<Control>) {
    let (engine, control) = MockEngine::replying(" a cat");
    let keys = ["alpha", "beta"].map(|key| Secret(key.into()));
    let api_keys = ApiKeys::load(&keys, None).unwrap();
    (TestServer::with(engine, Options { api_keys, limits, ..Options::default() }), control)
}

fn send(server: &TestServer, key: &str, body: &Value) -> Response {
    post_with(server.address, COMPLETIONS, ("Authorization", &format!("Bearer {key}")), body)
}

#[test]
fn keys_take_turns_and_do_not_share_prefixes() {
    let (server, control) = server(Limits::default());
    let last = |key: &str, body: Value| {
        assert_eq!(send(&server, key, &body).status, 200);
        let request = control.last();
        (request.tenant, request.cache_salt)
    };
    let plain = json!({"prompt": "x"});
    let [alpha, again, beta] = ["alpha", "alpha", "beta"].map(|key| last(key, plain.clone()));
    assert_eq!(alpha, again);
    assert!(alpha.0 != beta.0 && alpha.1 != beta.1 && alpha.1 != 0, "{alpha:?} {beta:?}");
    let salted = json!({"prompt": "x", "cache_salt": "s"});
    let [alpha, beta] = ["alpha", "beta"].map(|key| last(key, salted.clone()));
    assert_ne!(alpha.1, beta.1, "a salt is no way into the cache of another key");
}

#[test]
fn prefixes_are_shared_where_the_operator_says_so() {
    let (server, control) = server(Limits { share_prefix_cache: true, ..Limits::default() });
    for key in ["alpha", "beta"] {
        assert_eq!(send(&server, key, &json!({"prompt": "x"})).status, 200);
        assert_eq!(control.last().cache_salt, 0);
    }
}

#[test]
fn without_keys_an_address_is_a_tenant_and_prefixes_are_shared() {
    let (server, control) = TestServer::replying(" a cat");
    assert_eq!(post(server.address, COMPLETIONS, &json!({"prompt": "x"})).status, 200);
    let first = control.last();
    // An unknown header creates no other tenant.
    assert_eq!(send(&server, "unasked", &json!({"prompt": "x"})).status, 200);
    assert_eq!((control.last().tenant, control.last().cache_salt), (first.tenant, 0));
    assert_ne!(first.tenant, 0);
}

#[test]
fn a_trusted_proxy_names_the_tenant() {
    let (engine, control) = MockEngine::replying(" a cat");
    let trusted_proxies = TrustedProxies::new(&["127.0.0.1".into()]).unwrap();
    let server = TestServer::with(engine, Options { trusted_proxies, ..Options::default() });
    let tenant = |forwarded: &str| {
        let response = post_with(server.address, COMPLETIONS, ("X-Forwarded-For", forwarded), &json!({"prompt": "x"}));
        assert_eq!(response.status, 200);
        control.last().tenant
    };
    assert_ne!(tenant("203.0.113.7"), tenant("198.51.100.7"));
    assert_eq!(tenant("203.0.113.7"), tenant("198.51.100.7, 203.0.113.7"), "what the client claims counts for nothing");
    let group = |tenant: u64| tenant >> 32;
    let [one, neighbour, other] = ["203.0.113.7", "203.0.113.8", "203.0.112.7"].map(tenant);
    assert!(one != neighbour && group(one) == group(neighbour) && group(one) != group(other));

    let (server, control) = TestServer::replying(" a cat");
    let tenants = ["203.0.113.7", "198.51.100.7"].map(|forwarded| {
        post_with(server.address, COMPLETIONS, ("X-Forwarded-For", forwarded), &json!({"prompt": "x"})).text();
        control.last().tenant
    });
    assert_eq!(tenants[0], tenants[1], "nobody is trusted by default");
}

#[test]
fn a_key_makes_a_tenant_where_it_let_the_caller_in() {
    let (engine, control) = MockEngine::replying(" a cat");
    let admin_keys = ApiKeys::load(&[Secret("admin".into())], None).unwrap();
    let server = TestServer::with(engine, Options { admin_keys, ..Options::default() });
    let tenant = |key: &str| {
        assert_eq!(send(&server, key, &json!({"prompt": "x"})).status, 200);
        control.last().tenant
    };
    assert_eq!(tenant("unasked"), tenant("another"), "the address is");
    assert_ne!(tenant("unasked"), tenant("admin"));
}

#[test]
fn priorities_are_for_those_whom_the_operator_lets() {
    let body = json!({"prompt": "x", "priority": -5});
    let (server_without, _) = server(Limits::default());
    let refused = send(&server_without, "alpha", &body);
    assert_eq!(refused.status, 400);
    let error = refused.json()["error"].clone();
    assert_eq!((&error["param"], &error["code"]), (&json!("priority"), &json!("unsupported_parameter")));
    assert!(error["message"].as_str().unwrap().contains("(--allow-priority)"), "{error}");
    assert_eq!(send(&server_without, "alpha", &json!({"prompt": "x", "priority": 0})).status, 200);
    let (server, control) = server(Limits { allow_priority: true, ..Limits::default() });
    assert_eq!(send(&server, "alpha", &body).status, 200);
    assert_eq!(control.last().priority, -5);
}

#[test]
fn a_key_has_only_so_many_open_requests() {
    let (server, control) = server(Limits { max_requests_per_key: NonZeroUsize::new(3), ..Limits::default() });
    control.allow(0);
    let open = write_with_key(&server, &json!({"prompt": "x", "n": 2}));
    wait_until("both choices are there", || control.added() == 2);
    let refused = send(&server, "alpha", &json!({"prompt": "x", "n": 2}));
    assert_eq!(refused.status, 429);
    let error = refused.json()["error"].clone();
    assert_eq!(error["code"], "rate_limit_exceeded");
    assert!(error["message"].as_str().unwrap().contains("may have 3 (--max-requests-per-key)"), "{error}");
    control.allow(usize::MAX);
    assert_eq!(send(&server, "beta", &json!({"prompt": "x", "n": 3})).status, 200);
    drop(open);
    server.wait_idle();
    wait_until("the first request is over", || send(&server, "alpha", &json!({"prompt": "x", "n": 3})).status == 200);
}

fn write_with_key(server: &TestServer, body: &Value) -> std::net::TcpStream {
    let headers = [("Content-Type", "application/json"), ("Authorization", "Bearer alpha")];
    crate::support::client::write(server.address, "POST", COMPLETIONS, &headers, body.to_string().as_bytes())
}

/// A server with the keys `alpha` and `beta` and 4 MiB for bodies. Trials of grammars with the word "slow" never end.
#[cfg(unix)]
fn server_with_slow_grammars(dir: &TempDir) -> TestServer {
    use std::os::unix::fs::PermissionsExt;
    let program = dir.0.join("trial");
    let script = "#!/bin/sh\nif grep -q slow; then exec sleep 60; fi\necho ok 1\n";
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let trial = GrammarTrial { program, limits: GrammarLimits { memory: 64 << 20, time: Duration::from_secs(60) } };
    let api_keys = ApiKeys::load(&["alpha", "beta"].map(|key| Secret(key.into())), None).unwrap();
    let limits = Limits { max_inflight_bytes: 4 << 20, ..Limits::default() };
    TestServer::with(
        MockEngine::replying(" a cat").0.with_max_model_len(1 << 16),
        Options { api_keys, limits, grammar_trial: Some(trial), ..Options::default() },
    )
}

/// A completion with its own schema of `n` properties, which contains the word.
#[cfg(unix)]
fn with_schema(word: &str, number: usize, n: usize) -> Value {
    let property = |i: usize| (format!("{word}_{number}_{i}"), json!({"type": "integer"}));
    let properties: serde_json::Map<String, Value> = (0..n).map(property).collect();
    let schema = json!({"type": "object", "properties": properties});
    json!({"prompt": "x", "structured_outputs": {"json": schema}})
}

/// Sends an ordinary client's requests, which must not wait: a chat of 3 KB and 40 messages, texts to tokenize, a
/// schema.
#[cfg(unix)]
fn ordinary_requests_are_served(server: &TestServer, key: &str) {
    let message = |i: usize| json!({"role": if i.is_multiple_of(2) { "user" } else { "assistant" }, "content": "word ".repeat(15)});
    let chat = json!({"messages": (0..41).map(message).collect::<Vec<_>>()});
    let authorization = format!("Bearer {key}");
    for (path, body) in [
        (COMPLETIONS, json!({"prompt": "word ".repeat(600), "bad_words": ["z"]})),
        ("/v1/chat/completions", chat.clone()),
        ("/tokenize", chat),
        ("/tokenize", json!({"prompt": "word ".repeat(20_000)})),
        (COMPLETIONS, with_schema("quick", 0, 3)),
    ] {
        let began = Instant::now();
        let response = post_with(server.address, path, ("Authorization", &authorization), &body);
        let (status, text) = (response.status, response.text());
        assert_eq!(status, 200, "{path} after {:?}: {text}", began.elapsed());
    }
}

#[cfg(unix)]
#[test]
fn slow_grammars_of_one_key_keep_no_other_key_waiting() {
    let dir = TempDir::new("slow-grammars");
    let server = server_with_slow_grammars(&dir);
    // 25 KB and 500 properties each. Parsed, 20 of them take all the memory for parsed bodies.
    let bodies = (0..60).map(|i| with_schema("slow", i, 500));
    let open: Vec<_> = bodies.map(|body| write_with_key(&server, &body)).collect();
    std::thread::sleep(Duration::from_millis(300));
    ordinary_requests_are_served(&server, "beta");
    drop(open);
    wait_until("nothing is left of them", || {
        post_with(server.address, COMPLETIONS, ("Authorization", "Bearer alpha"), &with_schema("quick", 1, 500)).status
            == 200
    });
}

#[cfg(unix)]
#[test]
fn ignored_values_take_no_memory_while_a_grammar_waits() {
    let dir = TempDir::new("ignored-values");
    let server = server_with_slow_grammars(&dir);
    let giants = (0..6).map(|i| {
        let mut body = with_schema("slow", i, 3);
        body["x"] = vec![0; 14_000].into();
        body
    });
    let open: Vec<_> = giants.map(|body| write_with_key(&server, &body)).collect();
    std::thread::sleep(Duration::from_millis(300));
    ordinary_requests_are_served(&server, "beta");
    // The client itself waits only for grammars.
    let mut large = json!({"prompt": "x"});
    large["x"] = vec![0; 14_000].into();
    assert_eq!(send(&server, "alpha", &large).status, 200);
    drop(open);
}
