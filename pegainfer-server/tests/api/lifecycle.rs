//! Requests that end early: clients that hang up, engines that fail, full queues.

use crate::support::client::{get, post, post_ok, post_unread, read_head};
use crate::support::mock::MockEngine;
use crate::support::{Setup, TestServer, wait_until};
use serde_json::{Value, json};
use std::io::Read;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const COMPLETIONS: &str = "/v1/completions";

/// A request that runs for a long time.
fn long(stream: bool) -> Value {
    json!({"prompt": "x", "max_tokens": 400, "ignore_eos": true, "stream": stream})
}

#[test]
fn hanging_up_cancels_a_stream() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(3);
    let server = TestServer::start(engine, Setup::default());
    let mut response = post(server.address, COMPLETIONS, &long(true));
    assert!(response.chunk().unwrap().starts_with("data: {"));
    assert_eq!(server.engine.stats().running, 1);
    drop(response);
    server.wait_idle();
    assert_eq!(control.cancelled(), 1);
}

#[test]
fn hanging_up_cancels_a_plain_request() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(3);
    let server = TestServer::start(engine, Setup::default());
    let connection = post_unread(server.address, COMPLETIONS, &long(false));
    wait_until("it runs", || server.engine.stats().running == 1);
    drop(connection);
    server.wait_idle();
    assert_eq!(control.cancelled(), 1);
}

/// The whole answer to a client that closes its side after the request, like `nc -N`.
fn half_closed(server: &TestServer, body: &Value) -> String {
    let mut connection = post_unread(server.address, COMPLETIONS, body);
    connection.shutdown(Shutdown::Write).unwrap();
    let mut all = String::new();
    connection.read_to_string(&mut all).unwrap();
    all
}

#[test]
fn a_client_that_ends_its_side_gets_its_answer() {
    let (server, control) = TestServer::replying(" a cat sat");
    let plain = half_closed(&server, &json!({"prompt": "x"}));
    assert!(plain.starts_with("HTTP/1.1 200") && plain.contains(r#""text":" a cat sat""#), "{plain}");
    let stream = half_closed(&server, &json!({"prompt": "x", "stream": true}));
    assert!(stream.starts_with("HTTP/1.1 200") && stream.contains("data: [DONE]"), "{stream}");
    // Larger than the socket buffer.
    let large = json!({"prompt": vec!["x"; 24], "max_tokens": 400, "ignore_eos": true, "logprobs": 20});
    let large = half_closed(&server, &large);
    assert!(large.len() > 1 << 20 && large.ends_with('}'), "{} bytes", large.len());
    assert_eq!(control.cancelled(), 0);
}

#[test]
fn a_client_that_ends_its_side_and_waits_long_is_asked_whether_it_is_there() {
    let (server, control) = TestServer::replying(" a cat sat");
    control.allow(0);
    let later = control.clone();
    let allow = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(1400));
        later.allow(usize::MAX);
    });
    let plain = half_closed(&server, &json!({"prompt": "x"}));
    allow.join().unwrap();
    let answer = plain.strip_prefix("HTTP/1.1 100 Continue\r\n\r\n").unwrap_or_else(|| panic!("{plain}"));
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(" a cat sat"), "{plain}");
    assert_eq!(control.cancelled(), 0);
}

#[test]
fn a_client_that_read_all_there_was_and_hung_up_is_noticed() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(1);
    let server = TestServer::start(engine, Setup::default());
    let mut response = post(server.address, COMPLETIONS, &long(true));
    assert!(response.chunk().unwrap().starts_with("data: {"));
    // All bytes have been read, so its socket sends no reset, as if only its side had been closed.
    let started = Instant::now();
    drop(response);
    server.wait_idle();
    assert!(control.cancelled() == 1 && started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}

#[test]
fn hanging_up_cancels_what_is_still_queued() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(0);
    let server = TestServer::start(engine.with_max_num_seqs(1), Setup::default());
    let connections: Vec<TcpStream> =
        [true, false, true, false].map(|stream| post_unread(server.address, COMPLETIONS, &long(stream))).into();
    wait_until("all are there", || {
        let stats = server.engine.stats();
        (stats.running, stats.waiting) == (1, 3)
    });
    drop(connections);
    server.wait_idle();
    assert_eq!(control.cancelled(), 4);
}

#[test]
fn hanging_up_cancels_every_prompt_of_a_batch() {
    for stream in [true, false] {
        let (engine, control) = MockEngine::replying(" a cat sat");
        control.allow(4);
        let server = TestServer::start(engine.with_max_num_seqs(2), Setup::default());
        let mut body = long(stream);
        body["prompt"] = json!(["one", "two", "three"]);
        let connection = post_unread(server.address, COMPLETIONS, &body);
        wait_until("all are there", || control.added() == 3);
        drop(connection);
        server.wait_idle();
        assert_eq!(control.cancelled(), 3);
    }
}

#[test]
fn a_full_queue_gives_503_and_retry_after() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(0);
    let server = TestServer::start(engine, Setup { max_queued: 2, ..Setup::default() });
    let open: Vec<TcpStream> = (0..2).map(|_| post_unread(server.address, COMPLETIONS, &long(true))).collect();
    wait_until("the queue is full", || control.added() == 2);
    let response = post(server.address, COMPLETIONS, &long(false));
    assert_eq!((response.status, response.header("retry-after")), (503, Some("1")));
    let error = response.json();
    assert_eq!(error["error"]["type"], "server_error");
    assert_eq!(
        error["error"]["message"],
        "the server is busy: 2 requests are queued, as many as it takes (--max-queued-requests); try again later"
    );
    assert_eq!(get(server.address, "/health").status, 200, "busy is not ill");
    drop(open);
    server.wait_idle();
    // A batch that does not fit completely is refused completely.
    let batch = json!({"prompt": ["one", "two", "three"]});
    assert_eq!(post(server.address, COMPLETIONS, &batch).status, 503);
    server.wait_idle();
    let rejections = "vllm:admission_rejections_total{model_name=\"tiny\",engine=\"0\",reason=\"queue_full\"} 2";
    assert!(get(server.address, "/metrics").text().contains(rejections));
    control.allow(usize::MAX);
    post_ok(server.address, COMPLETIONS, &json!({"prompt": "x"}));
}

#[test]
fn a_failed_step_is_an_error_for_its_requests_only() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(0);
    control.fail.store(true, Ordering::SeqCst);
    let server = TestServer::start(engine, Setup::default());
    let before = post(server.address, COMPLETIONS, &long(true));
    assert_eq!(before.status, 500, "nothing was sent yet: an ordinary error");
    assert_eq!(before.json()["error"]["message"], "the scripted step failed");

    control.allow(2);
    let mut during = post(server.address, COMPLETIONS, &long(true));
    let mut text = during.chunk().unwrap();
    wait_until("two tokens are out", || control.tokens.load(Ordering::SeqCst) == 2);
    control.fail.store(true, Ordering::SeqCst);
    while let Some(chunk) = during.chunk() {
        text += &chunk;
    }
    let error =
        r#"data: {"error":{"message":"the scripted step failed","type":"server_error","param":null,"code":null}}"#;
    assert!(text.ends_with(&format!("{error}\n\ndata: [DONE]\n\n")), "{text}");

    control.allow(usize::MAX);
    post_ok(server.address, COMPLETIONS, &json!({"prompt": "x"}));
    let metrics = get(server.address, "/metrics").text();
    assert!(metrics.contains("finished_reason=\"error\"} 2"), "{metrics}");
}

#[test]
fn health_reports_a_lost_device() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(0);
    control.fatal.store(true, Ordering::SeqCst);
    control.fail.store(true, Ordering::SeqCst);
    let server = TestServer::start(engine, Setup::default());
    let failed = post(server.address, COMPLETIONS, &long(false));
    assert_eq!(failed.status, 500);
    assert_eq!(failed.json()["error"]["message"], "the scripted step failed");
    assert_eq!(get(server.address, "/health").status, 503, "whoever saw the failure sees the state");
    assert_eq!(get(server.address, "/health").text(), "the engine has stopped: the scripted step failed");
    let response = post(server.address, COMPLETIONS, &json!({"prompt": "x"}));
    assert_eq!(response.status, 503);
    assert_eq!(response.json()["error"]["code"], "engine_stopped");
}

#[test]
fn health_reports_a_stuck_device_within_a_second_of_the_deadline() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    let step_deadline = Duration::from_millis(300);
    let server = TestServer::start(engine, Setup { step_deadline, ..Setup::default() });
    control.hang.store(true, Ordering::SeqCst);
    let started = Instant::now();
    let open = post_unread(server.address, COMPLETIONS, &long(false));
    wait_until("health reports it", || get(server.address, "/health").status == 503);
    let noticed = started.elapsed();
    assert!(noticed >= step_deadline && noticed < step_deadline + Duration::from_secs(1), "{noticed:?}");
    assert_eq!(get(server.address, "/health").text(), "the engine makes no progress");
    let live = get(server.address, "/live");
    assert_eq!((live.status, live.text().as_str()), (503, "the engine makes no progress"));
    control.hang.store(false, Ordering::SeqCst);
    wait_until("the engine goes on", || get(server.address, "/health").status == 200);
    assert_eq!(get(server.address, "/live").status, 200);
    assert_eq!(read_head(open).status, 200);
}

#[test]
fn health_and_every_response_report_a_dead_engine() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(1);
    let server = TestServer::start(engine, Setup::default());
    let mut open = post(server.address, COMPLETIONS, &long(true));
    let mut text = open.chunk().unwrap();
    control.panic.store(true, Ordering::SeqCst);
    while let Some(chunk) = open.chunk() {
        text += &chunk;
    }
    assert!(text.contains("the engine stopped before the request was complete"), "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    wait_until("health says so", || get(server.address, "/health").status == 503);
    let response = post(server.address, COMPLETIONS, &json!({"prompt": "x"}));
    assert_eq!((response.status, response.header("retry-after")), (503, None));
    assert_eq!(response.json()["error"]["code"], "engine_stopped");
}

#[test]
fn aborted_requests_are_counted_as_such() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(2);
    let server = TestServer::start(engine, Setup::default());
    let mut response = post(server.address, COMPLETIONS, &long(true));
    response.chunk().unwrap();
    drop(response);
    server.wait_idle();
    wait_until("it is counted", || get(server.address, "/metrics").text().contains("finished_reason=\"abort\"} 1"));
    let metrics = get(server.address, "/metrics").text();
    assert!(metrics.contains("e2e_request_latency_seconds_count{model_name=\"tiny\",engine=\"0\"} 0"), "{metrics}");
}
