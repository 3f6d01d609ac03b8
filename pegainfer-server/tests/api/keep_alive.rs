//! Streams show that they are alive while no token arrives, in each of the four APIs.

use crate::support::client::{Response, get, post};
use crate::support::mock::{Control, MockEngine};
use crate::support::{TestServer, wait_until};
use pegainfer_server::app::Options;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_millis(100);

/// Path and body of a stream in each API, and the event that keeps it alive.
fn apis() -> [(&'static str, Value, &'static str); 4] {
    const COMMENT: &str = ": keep-alive\n\n";
    const PING: &str = "event: ping\ndata: {\"type\":\"ping\"}\n\n";
    let messages = json!([{"role": "user", "content": "x"}]);
    [
        ("/v1/completions", json!({"prompt": "x", "stream": true}), COMMENT),
        ("/v1/chat/completions", json!({"messages": messages, "stream": true}), COMMENT),
        ("/v1/responses", json!({"input": "x", "stream": true}), COMMENT),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 9, "stream": true}), PING),
    ]
}

fn silent_server() -> (TestServer, Arc<Control>) {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(0);
    let options = Options { keep_alive_interval: INTERVAL, ..Options::default() };
    (TestServer::with(engine, options), control)
}

/// Starts a stream, expects its head soon, and reads until it was kept alive `times` times.
fn open(server: &TestServer, path: &str, body: &Value, sign: &str, times: usize) -> (Response, String) {
    let started = Instant::now();
    let mut response = post(server.address, path, body);
    let head = started.elapsed();
    // The head is due after 400 ms.
    assert!(response.status == 200 && head < Duration::from_millis(900), "{path}: {} after {head:?}", response.status);
    assert_eq!(response.header("x-accel-buffering"), Some("no"));
    let mut text = String::new();
    while text.matches(sign).count() < times {
        text += &response.chunk().unwrap();
    }
    (response, text)
}

#[test]
fn a_stream_begins_and_stays_alive_without_a_token() {
    let (server, control) = silent_server();
    for (path, body, sign) in apis() {
        control.allow(0);
        control.tokens.store(0, Ordering::SeqCst);
        let started = Instant::now();
        let (response, beginning) = open(&server, path, &body, sign, 4);
        assert!(started.elapsed() >= 3 * INTERVAL, "{path}: a sign of life for each interval");
        let events: Vec<&str> = beginning.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
        match path {
            "/v1/messages" => assert_eq!(events, ["message_start", "ping", "ping", "ping", "ping"]),
            "/v1/responses" => assert_eq!(events, ["response.created", "response.in_progress"]),
            _ => assert!(events.is_empty()),
        }
        control.allow(usize::MAX);
        let rest = response.text();
        let last = match path {
            "/v1/messages" => "event: message_stop",
            "/v1/responses" => "event: response.completed",
            _ => "data: [DONE]",
        };
        assert!(rest.contains(last), "{path}: {rest}");
        let begun = |name: &str| (beginning.clone() + &rest).matches(&format!("event: {name}\n")).count();
        assert!(begun("message_start") + begun("response.created") <= 1, "{path}: it begins once");
        server.wait_idle();
    }
}

#[test]
fn a_stream_that_pauses_between_tokens_is_kept_alive() {
    let (server, control) = silent_server();
    for (path, body, sign) in apis() {
        control.tokens.store(0, Ordering::SeqCst);
        control.allow(2);
        let (response, _) = open(&server, path, &body, sign, 2);
        control.allow(usize::MAX);
        assert!(response.text().contains("sat"), "{path}");
        server.wait_idle();
    }
}

#[test]
fn a_stream_with_unsent_tokens_is_kept_alive() {
    let (server, control) = silent_server();
    // The input of a custom tool is sent when it is complete.
    let input = "word ".repeat(200);
    let call = format!("<tool_call>\n{{\"name\": \"patch\", \"arguments\": {{\"input\": \"{input}\"}}}}\n</tool_call>");
    control.script(move |_| call);
    let tools = json!([{"type": "custom", "name": "patch"}]);
    let mut response = post(server.address, "/v1/responses", &json!({"input": "x", "tools": tools, "stream": true}));
    let (mut text, begun) = (String::new(), Instant::now());
    for tokens in 1.. {
        control.allow(tokens);
        std::thread::sleep(INTERVAL / 10);
        if begun.elapsed() > 8 * INTERVAL {
            break;
        }
    }
    while !text.contains("response.output_item.done") {
        text += &response.chunk().unwrap();
        control.allow(usize::MAX);
    }
    let (_, silence) = text.rsplit_once("response.output_item.added").unwrap();
    let count = silence.matches(": keep-alive").count();
    assert!(count >= 3, "{count} signs of life in {text}");
    text += &response.text();
    assert!(text.contains("event: response.completed"), "{text}");
}

#[test]
fn a_failure_after_the_head_is_an_event_of_the_api() {
    let (server, control) = silent_server();
    for (path, body, sign) in apis() {
        let (response, _) = open(&server, path, &body, sign, 1);
        control.fail.store(true, Ordering::SeqCst);
        let rest = response.text();
        let data = rest
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .find(|data| data.contains("scripted step failed"));
        let event: Value = serde_json::from_str(data.unwrap_or_else(|| panic!("{path}: {rest}"))).unwrap();
        match path {
            "/v1/messages" => {
                assert!(rest.contains("event: error\n"), "{rest}");
                assert_eq!((&event["type"], &event["error"]["type"]), (&json!("error"), &json!("api_error")));
            }
            "/v1/responses" => {
                assert!(rest.contains("event: response.failed\n"), "{rest}");
                assert_eq!(event["response"]["status"], "failed");
            }
            _ => {
                assert_eq!(event["error"]["type"], "server_error");
                assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
            }
        }
        server.wait_idle();
    }
    // The statuses that the responses would have had without an early head.
    wait_until("all failures are counted", || {
        let metrics = get(server.address, "/metrics").text();
        let failed = |path: &str| {
            let line = format!("handler=\"{path}\",status=\"5xx\",code=\"500\"}} 1");
            metrics.contains(&line)
        };
        let refused = |line: &str| line.contains("refused_requests_total{") && line.contains("\"server_error\"} 4");
        metrics.lines().any(refused) && apis().iter().all(|(path, ..)| failed(path))
    });
}
