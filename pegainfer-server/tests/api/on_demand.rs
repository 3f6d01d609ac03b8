//! Models that come and go.

use crate::support::client::{get, post, post_ok, post_unread, post_with, read_head, send, with};
use crate::support::on_demand::{BYTES, OnDemand};
use crate::support::wait_until;
use pegainfer_server::app::Options;
use pegainfer_server::http::ApiKeys;
use pegainfer_server::models::ModelLimits;
use pegainfer_testing::TempDir;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

const COMPLETIONS: &str = "/v1/completions";

fn body(model: &str) -> Value {
    json!({"model": model, "prompt": "x", "max_tokens": 3, "ignore_eos": true})
}

/// A request that runs until its engine may generate more tokens.
fn long(model: &str) -> Value {
    with(body(model), json!({"max_tokens": 400, "stream": true}))
}

fn local_admin() -> Options {
    Options { admin_local: true, ..Options::default() }
}

fn switch(address: SocketAddr, path: &str) -> (u16, Value) {
    let response = send(address, "POST", path, &[], b"");
    (response.status, response.json())
}

#[test]
fn a_request_loads_its_model_and_the_least_recently_used_one_leaves() {
    let on = OnDemand::start(&["a", "b", "c"], 2, local_admin());
    let address = on.server.address;
    assert_eq!(["a", "b", "c"].map(|name| on.state(name)), ["unloaded"; 3].map(str::to_owned));
    assert_eq!(on.card("a")["max_model_len"], Value::Null);
    for name in ["a", "b", "a"] {
        assert_eq!(post_ok(address, COMPLETIONS, &body(name))["model"], name);
    }
    assert_eq!(["a", "b", "c"].map(|name| on.state(name)), ["loaded", "loaded", "unloaded"].map(str::to_owned));
    post_ok(address, COMPLETIONS, &body("c"));
    assert_eq!(["a", "b", "c"].map(|name| on.state(name)), ["loaded", "unloaded", "loaded"].map(str::to_owned));
    let card = on.card("a");
    assert_eq!(
        (&card["memory_bytes"], &card["pinned"], &card["max_model_len"]),
        (&json!(BYTES), &json!(false), &json!(512))
    );
    assert!(card["last_used"].as_u64().unwrap() > 1_700_000_000, "{card}");
    // Without a name, the first model.
    assert_eq!(post_ok(address, COMPLETIONS, &json!({"prompt": "x", "max_tokens": 1}))["model"], "a");
    let metrics = get(address, "/metrics").text();
    for series in [
        "vllm:request_success_total{model_name=\"b\",engine=\"0\",finished_reason=\"length\"} 1",
        "vllm:request_success_total{model_name=\"a\",engine=\"0\",finished_reason=\"length\"} 3",
        "vllm:num_requests_running{model_name=\"c\",engine=\"0\"} 0",
    ] {
        assert!(metrics.contains(series), "{series}: {metrics}");
    }
    assert!(!metrics.contains("vllm:num_requests_running{model_name=\"b\""), "{metrics}");
    let error = post(address, COMPLETIONS, &body("bb")).json()["error"]["message"].to_string();
    assert!(error.contains("did you mean b?; this server has: a, b, c"), "{error}");
    assert_eq!(get(address, "/health").status, 200);
}

#[test]
fn requests_share_a_load_and_streams_begin_while_it_lasts() {
    let on = OnDemand::start(&["a"], 1, Options::default());
    on.scripted[0].is_slow.store(true, SeqCst);
    let streams: Vec<_> = (0..5)
        .map(|_| post_unread(on.server.address, COMPLETIONS, &with(body("a"), json!({"stream": true}))))
        .collect();
    let mut streams = streams.into_iter().map(read_head).collect::<Vec<_>>();
    assert!(streams.iter().all(|response| response.status == 200), "the heads came early");
    assert_eq!(streams[0].chunk().unwrap(), ": keep-alive\n\n");
    assert_eq!(streams[0].chunk().unwrap(), ": loading a, 1 s\n\n");
    assert_eq!(on.state("a"), "loading");
    assert_eq!(get(on.server.address, "/load").json()["waiting"], 5);
    on.scripted[0].is_slow.store(false, SeqCst);
    for stream in streams {
        let text = stream.text();
        assert!(text.contains("\"finish_reason\":\"length\"") && text.ends_with("data: [DONE]\n\n"), "{text}");
    }
    assert_eq!((on.scripted[0].prepared.load(SeqCst), on.scripted[0].started.load(SeqCst)), (1, 1));
}

#[test]
fn a_model_that_nobody_waits_for_is_not_loaded() {
    let on = OnDemand::start(&["a", "b"], 1, Options::default());
    post_ok(on.server.address, COMPLETIONS, &body("b"));
    on.scripted[0].is_slow.store(true, SeqCst);
    let waiting = post_unread(on.server.address, COMPLETIONS, &body("a"));
    on.wait_for("a", "loading");
    drop(waiting);
    wait_until("the server sees that the client left", || on.models.waiting() == 0);
    on.scripted[0].is_slow.store(false, SeqCst);
    on.wait_for("a", "unloaded");
    assert_eq!((on.scripted[0].started.load(SeqCst), on.state("b").as_str()), (0, "loaded"));
    post_ok(on.server.address, COMPLETIONS, &body("a"));
}

#[test]
fn a_running_request_keeps_its_model_and_others_wait_for_it() {
    let limits = ModelLimits { memory: Some(BYTES), wait: Duration::from_secs(2), ..ModelLimits::default() };
    let on = OnDemand::start_with(&["a", "b"], limits, local_admin(), |_| ());
    let address = on.server.address;
    post_ok(address, COMPLETIONS, &body("a"));
    on.control(0).allow(10);
    let running = post_unread(address, COMPLETIONS, &long("a"));
    wait_until("it runs", || on.control(0).added() == 2);
    let refused = post(address, COMPLETIONS, &body("b"));
    assert_eq!((refused.status, refused.header("retry-after").is_some()), (503, true));
    let message = refused.json()["error"]["message"].to_string();
    assert!(message.contains("needs the memory of models whose requests have run for 2 s (--model-wait)"), "{message}");
    let (status, error) = switch(address, "/v1/models/a/unload");
    assert_eq!(status, 503, "{error}");
    // It is open again.
    let waiting = post_unread(address, COMPLETIONS, &body("b"));
    std::thread::sleep(Duration::from_millis(300));
    on.control(0).allow(usize::MAX);
    assert_eq!(read_head(waiting).status, 200);
    let text = read_head(running).text();
    assert!(text.ends_with("data: [DONE]\n\n") && text.contains("\"length\""), "the running request ended: {text}");
    assert_eq!(["a", "b"].map(|name| on.state(name)), ["unloaded", "loaded"].map(str::to_owned));
}

#[test]
fn a_model_that_cannot_be_loaded_leaves_everything_as_it_was() {
    let on = OnDemand::start(&["a", "b"], 1, Options::default());
    let address = on.server.address;
    post_ok(address, COMPLETIONS, &body("a"));
    on.scripted[1].is_broken.store(true, SeqCst);
    for stream in [false, true] {
        let refused = post(address, COMPLETIONS, &with(body("b"), json!({"stream": stream})));
        assert_eq!(refused.status, 503);
        let error = refused.json()["error"].clone();
        assert_eq!(error["code"], "model_not_loaded");
        assert_eq!(error["message"], "the model b cannot be loaded: model.safetensors is cut off");
    }
    assert_eq!(on.scripted[1].started.load(SeqCst), 1, "it is not tried again at once");
    assert_eq!((on.state("b").as_str(), on.card("b")["memory_bytes"].as_u64()), ("failed", Some(0)));
    assert!(on.card("b")["error"].as_str().unwrap().contains("cut off"));
    on.wait_for("a", "loaded");
    // One that can never fit makes nobody leave.
    on.scripted[1].is_broken.store(false, SeqCst);
    on.scripted[1].bytes.store(3_000_000, SeqCst);
    let on_a = on.scripted[0].started.load(SeqCst);
    wait_until("it may be tried again", || {
        let message = post(address, COMPLETIONS, &body("b")).json()["error"]["message"].to_string();
        message
            .contains("the model b needs 0.003 GB, 0.002 GB more than pinned models leave of the 0.001 GB for models")
    });
    assert_eq!((on.state("a").as_str(), on.scripted[0].started.load(SeqCst)), ("loaded", on_a));
}

#[test]
fn an_engine_that_stops_leaves_the_others_alone() {
    let on = OnDemand::start(&["a", "b"], 2, Options::default());
    let address = on.server.address;
    for name in ["a", "b"] {
        post_ok(address, COMPLETIONS, &body(name));
    }
    on.control(0).allow(0);
    on.control(0).panic.store(true, SeqCst);
    assert!(post(address, COMPLETIONS, &body("a")).status >= 500);
    on.wait_for("a", "failed");
    assert!(on.card("a")["error"].as_str().unwrap().contains("its engine has stopped"), "{}", on.card("a"));
    post_ok(address, COMPLETIONS, &body("b"));
    assert_eq!(get(address, "/health").status, 200);
    wait_until("it is loaded again", || post(address, COMPLETIONS, &body("a")).status == 200);
}

#[test]
fn idle_models_leave_after_their_time() {
    let limits = ModelLimits { idle_time: Some(Duration::from_secs(3600)), ..ModelLimits::default() };
    let on = OnDemand::start_with(&["a", "b", "c"], limits, Options::default(), |spec| {
        spec.idle_time = (spec.names[0] == "b").then_some(Duration::from_millis(300));
    });
    let address = on.server.address;
    for (name, keep_alive) in [("a", json!(null)), ("b", json!(null)), ("c", json!("100ms"))] {
        post_ok(address, COMPLETIONS, &with(body(name), json!({"keep_alive": keep_alive})));
    }
    for name in ["b", "c"] {
        on.wait_for(name, "unloaded");
    }
    assert_eq!(on.state("a"), "loaded");
    post_ok(address, COMPLETIONS, &with(body("b"), json!({"keep_alive": -1})));
    std::thread::sleep(Duration::from_millis(900));
    assert_eq!(on.state("b"), "loaded");
    post_ok(address, COMPLETIONS, &with(body("b"), json!({"keep_alive": 0})));
    on.wait_for("b", "unloaded");
    let error = post(address, COMPLETIONS, &with(body("b"), json!({"keep_alive": "soon"})));
    assert!(error.status == 400 && error.text().contains("keep_alive"));
}

#[test]
fn admins_load_unload_and_put_to_sleep() {
    let on = OnDemand::start_with(&["a", "org/b"], ModelLimits::default(), local_admin(), |spec| {
        spec.pinned = spec.names[0] == "a";
    });
    let address = on.server.address;
    for (path, state) in [
        ("/v1/models/org/b/load", "loaded"),
        ("/v1/models/org/b/sleep", "sleeping"),
        ("/v1/models/org/b/sleep", "sleeping"),
        ("/v1/models/org/b/load", "loaded"),
        ("/v1/models/org/b/sleep?level=1", "sleeping"),
        ("/v1/models/org/b/unload", "unloaded"),
        ("/v1/models/org/b/unload", "unloaded"),
        ("/v1/models/a/load", "loaded"),
    ] {
        let (status, answer) = switch(address, path);
        assert_eq!((status, &answer["state"]), (200, &json!(state)), "{path}: {answer}");
    }
    assert_eq!(on.scripted[1].started.load(SeqCst), 2);
    assert!(on.scripted[1].kept_text.load(SeqCst), "a sleeping model keeps its tokenizer");
    for (path, expected) in [
        ("/v1/models/a/unload", (409, json!("model_stays"))),
        ("/v1/models/x/load", (404, json!("model_not_found"))),
        ("/v1/models/a/dance", (405, json!(null))),
        ("/v1/models/org/b/sleep?level=3", (400, json!(null))),
    ] {
        let (status, answer) = switch(address, path);
        assert_eq!((status, answer["error"]["code"].clone()), expected, "{path}: {answer}");
    }
    let others = OnDemand::start(&["a"], 1, Options::default());
    assert_eq!(switch(others.server.address, "/v1/models/a/load").0, 403, "only admins");
}

#[test]
fn a_key_may_be_limited_to_models() {
    let dir = TempDir::new("model-keys");
    let file = dir.path().join("keys");
    std::fs::write(&file, "one models=b\nall\n").unwrap();
    let keys = ApiKeys::load(&[], Some(&file)).unwrap();
    let on = OnDemand::start(&["a", "b"], 2, Options { api_keys: keys, ..Options::default() });
    let address = on.server.address;
    let ask = |key: &str, body: &Value| post_with(address, COMPLETIONS, ("x-api-key", key), body);
    assert_eq!(ask("all", &body("a")).status, 200);
    let refused = ask("one", &body("a"));
    assert_eq!(refused.status, 404);
    assert!(refused.text().ends_with(
        "this server has: b\",\"type\":\"invalid_request_error\",\"param\":\"model\",\"code\":\"model_not_found\"}}"
    ));
    assert_eq!(ask("one", &json!({"prompt": "x", "max_tokens": 1})).json()["model"], "b", "its first model");
    let list = send(address, "GET", "/v1/models", &[("x-api-key", "one")], b"").json();
    assert_eq!((list["data"].as_array().unwrap().len(), &list["data"][0]["id"]), (1, &json!("b")));
}

#[test]
fn everybody_makes_progress_when_one_of_three_models_fits() {
    let on = OnDemand::start(&["a", "b", "c"], 1, Options::default());
    let address = on.server.address;
    let client = |client: usize| {
        move || {
            let mut longest = Duration::ZERO;
            for turn in 0..6 {
                let name = ["a", "b", "c"][(client + turn / 2) % 3];
                let asked = Instant::now();
                // A stream, of which the comments keep the connection open on a busy machine.
                let events = post(address, COMPLETIONS, &with(body(name), json!({"stream": true}))).events();
                assert_eq!((events.len(), &events[0]["model"]), (3, &json!(name)));
                longest = longest.max(asked.elapsed());
            }
            longest
        }
    };
    let clients: Vec<_> = (0..20).map(|i| std::thread::spawn(client(i))).collect();
    let longest = clients.into_iter().map(|client| client.join().unwrap()).max().unwrap();
    assert!(longest < Duration::from_secs(60), "a request waited {longest:?}");
    let loads: usize = on.scripted.iter().map(|model| model.started.load(SeqCst)).sum();
    assert!((3..=60).contains(&loads), "{loads} loads for 120 requests");
}
