//! Several engines in one server: routes, pins, a lost engine, metrics.

use crate::support::client::{get, post, post_ok, post_unread, post_with, read_head, send};
use crate::support::mock::{Control, MockEngine};
use crate::support::{Setup, TestServer, wait_until};
use pegainfer_server::app::Options;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const RANK: &str = "X-data-parallel-rank";

/// A server over two scripted engines.
fn two_engines() -> (TestServer, [Arc<Control>; 2]) {
    two_engines_for(64)
}

/// Engines that run this many requests at once.
fn two_engines_for(max_num_seqs: usize) -> (TestServer, [Arc<Control>; 2]) {
    let (engines, controls): (Vec<_>, Vec<_>) = (0..2).map(|_| MockEngine::replying(" a cat sat")).unzip();
    let engines = engines.into_iter().map(|engine| engine.with_max_num_seqs(max_num_seqs)).collect();
    let options = Options { admin_local: true, ..Setup::default().options };
    (TestServer::start_all(engines, Setup { options, ..Setup::default() }), controls.try_into().ok().unwrap())
}

fn added(controls: &[Arc<Control>; 2]) -> [usize; 2] {
    [controls[0].added(), controls[1].added()]
}

#[test]
fn requests_spread_and_choices_stay_together() {
    let (server, controls) = two_engines();
    for i in 0..4 {
        post_ok(server.address, COMPLETIONS, &json!({"prompt": format!("prompt number {i}"), "max_tokens": 3}));
        server.wait_idle();
    }
    assert_eq!(added(&controls), [2, 2]);
    for _ in 0..2 {
        post_ok(server.address, COMPLETIONS, &json!({"prompt": "Once upon a time", "n": 5, "max_tokens": 3}));
        server.wait_idle();
    }
    let after = added(&controls);
    assert_eq!((after[0] + after[1], (after[0] - 2) % 5), (14, 0), "{after:?}");
}

#[test]
fn a_header_names_the_engine() {
    let (server, controls) = two_engines();
    for (path, body) in [
        (COMPLETIONS, json!({"prompt": "x", "max_tokens": 3})),
        (CHAT, json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 3})),
        ("/inference/v1/generate", json!({"token_ids": [1], "sampling_params": {"max_tokens": 3}})),
        ("/v1/responses", json!({"input": "x", "max_output_tokens": 16})),
        ("/v1/messages", json!({"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]})),
    ] {
        let before = added(&controls);
        for _ in 0..3 {
            assert_eq!(post_with(server.address, path, (RANK, "1"), &body).status, 200, "{path}");
        }
        assert_eq!(added(&controls), [before[0], before[1] + 3], "{path}");
        for (rank, words) in [("2", "this server has 2 engines"), ("-1", "counted from 0"), ("x", "counted from 0")] {
            let refused = post_with(server.address, path, (RANK, rank), &body);
            assert_eq!(refused.status, 400, "{path} {rank}");
            let text = refused.text();
            assert!(text.contains(RANK) && text.contains(words), "{text}");
        }
    }
    let (alone, control) = TestServer::replying(" a cat");
    let body = json!({"prompt": "x", "max_tokens": 2});
    assert_eq!(post_with(alone.address, COMPLETIONS, (RANK, "0"), &body).status, 200);
    assert_eq!(post_with(alone.address, COMPLETIONS, (RANK, "1"), &body).status, 400);
    assert_eq!(control.added(), 1);
}

/// The value of a series in `/metrics`.
fn metric(server: &TestServer, name: &str, labels: &[&str]) -> f64 {
    let text = get(server.address, "/metrics").text();
    let line = text.lines().find(|line| {
        let rest = line.strip_prefix(name);
        rest.is_some_and(|rest| rest.starts_with('{')) && labels.iter().all(|label| line.contains(label))
    });
    let line = line.unwrap_or_else(|| panic!("{name} {labels:?} is not in {text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn a_lost_engine_fails_its_own_streams_and_the_rest_go_on() {
    let (server, controls) = two_engines_for(1);
    controls.iter().for_each(|control| control.allow(2));
    let long = |max_tokens: usize| json!({"prompt": "x", "max_tokens": max_tokens, "ignore_eos": true, "stream": true});
    let on = |rank: &str, body: &Value| {
        let body = body.to_string();
        let headers = [(RANK, rank), ("Content-Type", "application/json")];
        crate::support::client::write(server.address, "POST", COMPLETIONS, &headers, body.as_bytes())
    };
    // One runs on each engine, and two more wait, one for each.
    let lost = on("0", &long(9));
    let kept = on("1", &long(4));
    wait_until("both run", || server.engine.stats().running == 2);
    let waiting: Vec<_> = (0..2).map(|_| post_unread(server.address, COMPLETIONS, &long(3))).collect();
    wait_until("all are there", || added(&controls) == [2, 2]);
    controls[0].fatal.store(true, Ordering::SeqCst);
    controls[0].fail.store(true, Ordering::SeqCst);
    let lost = read_head(lost).text();
    assert!(lost.contains("\"error\":{\"message\":\"the scripted step failed\""), "{lost}");
    let health = get(server.address, "/health");
    assert_eq!(health.status, 200);
    assert_eq!(health.text(), "engine 0 of 2 has stopped: the scripted step failed\n");
    controls[1].allow(usize::MAX);
    let kept = read_head(kept).text();
    assert!(kept.contains("[DONE]") && !kept.contains("\"error\""), "{kept}");
    for stream in waiting {
        let text = read_head(stream).text();
        assert!(!text.contains("\"error\"") && text.matches("\"text\"").count() >= 3, "{text}");
    }
    assert_eq!(controls[1].added(), 3, "the waiting one of engine 0 has moved");
    assert_eq!(metric(&server, "pegainfer:engines_healthy", &[]), 1.0);
    assert_eq!(metric(&server, "pegainfer:routes_total", &["engine=\"1\"", "reason=\"moved\""]), 1.0);
    let load = get(server.address, "/load").json();
    let healthy: Vec<bool> = load["engines"].as_array().unwrap().iter().map(|e| e["healthy"] == true).collect();
    assert_eq!((load["server_load"].as_u64(), healthy), (Some(0), vec![false, true]));
    let refused = post_with(server.address, COMPLETIONS, (RANK, "0"), &json!({"prompt": "x"}));
    assert_eq!(refused.status, 503);
    assert!(refused.text().contains("engine 0 has stopped"));
    (0..3).for_each(|_| drop(post_ok(server.address, COMPLETIONS, &json!({"prompt": "x", "max_tokens": 2}))));
    assert_eq!(send(server.address, "POST", "/reset_prefix_cache", &[], b"").status, 200);
    // The last engine takes the server with it.
    controls[1].allow(0);
    controls[1].panic.store(true, Ordering::SeqCst);
    assert_eq!(post(server.address, COMPLETIONS, &json!({"prompt": "x"})).status, 500);
    wait_until("the last engine is gone", || get(server.address, "/health").status == 503);
    assert!(get(server.address, "/health").text().contains("the engine has stopped"));
    assert_eq!(post(server.address, COMPLETIONS, &json!({"prompt": "x"})).status, 503);
}

#[test]
fn a_stuck_engine_is_named_and_gets_no_requests() {
    let (engines, controls): (Vec<_>, Vec<_>) = (0..2).map(|_| MockEngine::replying(" a cat sat")).unzip();
    let step_deadline = std::time::Duration::from_millis(200);
    let server = TestServer::start_all(engines, Setup { step_deadline, ..Setup::default() });
    controls[0].hang.store(true, Ordering::SeqCst);
    let body = json!({"prompt": "x", "max_tokens": 2}).to_string();
    let headers = [(RANK, "0"), ("Content-Type", "application/json")];
    let stuck = crate::support::client::write(server.address, "POST", COMPLETIONS, &headers, body.as_bytes());
    wait_until("it is named", || get(server.address, "/health").text() == "engine 0 of 2 makes no progress\n");
    (0..4).for_each(|_| drop(post_ok(server.address, COMPLETIONS, &json!({"prompt": "x", "max_tokens": 2}))));
    assert_eq!((controls[0].added(), controls[1].added()), (1, 4));
    controls[0].hang.store(false, Ordering::SeqCst);
    assert_eq!(read_head(stuck).status, 200);
    assert_eq!(get(server.address, "/health").text(), "");
}

#[test]
fn a_reset_reaches_every_engine() {
    let (server, controls) = two_engines();
    assert_eq!(send(server.address, "POST", "/reset_prefix_cache", &[], b"").status, 200);
    assert!(controls.iter().all(|control| control.resets.load(Ordering::SeqCst) == 1));
}

#[test]
fn metrics_and_steps_name_the_engine() {
    let (server, _controls) = two_engines();
    for (rank, requests) in [("0", 1), ("1", 3)] {
        let body = json!({"prompt": "x y z", "max_tokens": 3});
        (0..requests).for_each(|_| assert_eq!(post_with(server.address, COMPLETIONS, (RANK, rank), &body).status, 200));
    }
    server.wait_idle();
    let text = get(server.address, "/metrics").text();
    // Every series of an engine is there once for each of them.
    let mut engines: BTreeMap<String, [usize; 2]> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (name, labels) = line.split_once('{').unwrap();
        if let Some((_, rest)) = labels.split_once("engine=\"") {
            engines.entry(name.to_owned()).or_default()[usize::from(!rest.starts_with('0'))] += 1;
        }
    }
    let of_server = [
        "http_",
        "process_",
        "pegainfer:unread",
        "pegainfer:log_",
        "pegainfer:record",
        "pegainfer:refused",
        "pegainfer:model_",
    ];
    let of_requests = ["vllm:admission_rej", "vllm:request_params_n_", "vllm:request_max_num_"];
    let is_shared = |name: &str| of_server.iter().chain(&of_requests).any(|prefix| name.starts_with(prefix));
    for (name, counts) in &engines {
        let expected = if is_shared(name) { [counts[0], 0] } else { [counts[0]; 2] };
        assert_eq!(*counts, expected, "{name}");
    }
    for (name, values) in [
        ("vllm:generation_tokens_total", [3.0, 9.0]),
        ("vllm:time_to_first_token_seconds_count", [1.0, 3.0]),
        ("vllm:inter_token_latency_seconds_count", [2.0, 6.0]),
        ("vllm:request_success_total", [1.0, 3.0]),
        ("pegainfer:routes_total", [1.0, 3.0]),
    ] {
        for (engine, value) in values.into_iter().enumerate() {
            let mut labels = vec![format!("engine=\"{engine}\"")];
            labels.extend((name == "pegainfer:routes_total").then(|| "reason=\"pinned\"".to_owned()));
            labels.extend((name == "vllm:request_success_total").then(|| "finished_reason=\"length\"".to_owned()));
            let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
            assert_eq!(metric(&server, name, &labels), value, "{name} of engine {engine}");
        }
    }
    assert_eq!(metric(&server, "pegainfer:engines_healthy", &[]), 2.0);
    for engine in 0..2 {
        let steps = get(server.address, &format!("/debug/steps?engine={engine}"));
        assert_eq!((steps.status, steps.text().lines().count()), (200, 5));
    }
    for engine in ["2", "x"] {
        assert_eq!(get(server.address, &format!("/debug/steps?engine={engine}")).status, 400);
    }
}
