//! Requests that the server cancels: at their deadline, and when it shuts down.

use crate::support::client::{Response, get, post, post_ok, post_unread, post_with, read_head};
use crate::support::mock::MockEngine;
use crate::support::{Setup, TestServer, endless_template, wait_until};
use pegainfer_server::app::Options;
use serde_json::{Value, json};
use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

const COMPLETIONS: &str = "/v1/completions";

/// A request that runs for a long time.
fn long(stream: bool) -> Value {
    json!({"prompt": "x", "max_tokens": 400, "ignore_eos": true, "stream": stream})
}

fn limited(milliseconds: u64) -> Options {
    Options { request_timeout: Some(Duration::from_millis(milliseconds)), ..Options::default() }
}

fn draining(milliseconds: u64) -> Options {
    Options { drain_timeout: Duration::from_millis(milliseconds), ..Options::default() }
}

/// The rest of a stream.
fn rest(mut response: Response) -> String {
    std::iter::from_fn(|| response.chunk()).collect()
}

#[test]
fn a_plain_request_is_cancelled_at_its_deadline() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(3);
    let server = TestServer::with(engine, limited(150));
    let response = post(server.address, COMPLETIONS, &long(false));
    assert_eq!(response.status, 504);
    let error = response.json()["error"].clone();
    assert_eq!((&error["type"], &error["code"]), (&json!("server_error"), &json!("request_timeout")));
    assert_eq!(error["message"], "the request was cancelled: it took longer than 0.15 s");
    server.wait_idle();
    assert_eq!(control.cancelled(), 1);
    control.allow(usize::MAX);
    post_ok(server.address, COMPLETIONS, &json!({"prompt": "x"}));
}

#[test]
fn a_stream_is_cancelled_at_its_deadline_with_an_event() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(3);
    let server = TestServer::with(engine, limited(150));
    let response = post(server.address, COMPLETIONS, &long(true));
    assert_eq!(response.status, 200);
    let text = rest(response);
    let error = r#"data: {"error":{"message":"the request was cancelled: it took longer than 0.15 s","type":"server_error","param":null,"code":"request_timeout"}}"#;
    assert!(text.ends_with(&format!("{error}\n\ndata: [DONE]\n\n")), "{text}");
    assert_eq!(text.matches("\"text\"").count(), 3, "what came before stays: {text}");
    server.wait_idle();
    assert_eq!(control.cancelled(), 1);
}

#[test]
fn the_deadline_holds_after_an_early_head() {
    let dir = endless_template("deadline");
    let (engine, control) = MockEngine::replying(" a cat sat");
    let setup = Setup { options: limited(700), model_dir: dir.0.clone(), ..Setup::default() };
    let server = TestServer::start(engine, setup);
    // Two threads render, one template at a time until its instructions are used up. The last ones wait.
    let body = json!({"messages": [{"role": "user", "content": "x"}], "stream": true});
    let chats: Vec<TcpStream> = (0..16).map(|_| post_unread(server.address, "/v1/chat/completions", &body)).collect();
    let begun = chats.into_iter().map(read_head).filter(|response| response.status == 200);
    let ends: Vec<String> = begun.map(rest).collect();
    let error = r#"data: {"error":{"message":"the request was cancelled: it took longer than 0.7 s","type":"server_error","param":null,"code":"request_timeout"}}"#;
    let late = ends.iter().filter(|text| text.ends_with(&format!("{error}\n\ndata: [DONE]\n\n"))).count();
    assert!(late > 0 && ends.iter().all(|text| text.starts_with(": keep-alive\n\n")), "{ends:?}");
    assert_eq!(control.added(), 0);
    // Cancelled requests are not rendered: that would keep the threads busy several times as long.
    wait_until("the threads are free", || post(server.address, COMPLETIONS, &json!({"prompt": "x"})).status == 200);
}

#[test]
fn the_deadline_counts_the_time_in_the_queue() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(1);
    let server = TestServer::start(engine.with_max_num_seqs(1), Default::default());
    let mut running = post(server.address, COMPLETIONS, &long(true));
    running.chunk().unwrap();
    let queued = post_with(server.address, COMPLETIONS, ("x-request-timeout", "0.1"), &long(true));
    assert_eq!(queued.status, 504, "nothing was sent yet: an ordinary error");
    wait_until("only the other one is left", || server.engine.stats().waiting == 0);
    assert_eq!(server.engine.stats().running, 1);
}

#[test]
fn a_client_may_shorten_the_deadline_only() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(0);
    let server = TestServer::with(engine, limited(600));
    let status = |limit: &str| {
        let started = Instant::now();
        let response = post_with(server.address, COMPLETIONS, ("x-request-timeout", limit), &long(false));
        (response.status, started.elapsed())
    };
    let (shortened, took) = status("0.05");
    assert!(shortened == 504 && took < Duration::from_millis(600), "{shortened} after {took:?}");
    let (lengthened, took) = status("1000");
    assert!(lengthened == 504 && took < Duration::from_secs(10), "{lengthened} after {took:?}");
    for bad in ["0", "-1", "soon", "1e300"] {
        let response = post_with(server.address, COMPLETIONS, ("x-request-timeout", bad), &long(false));
        assert_eq!(response.status, 400, "{bad}");
        assert_eq!(response.json()["error"]["param"], "x-request-timeout");
    }
}

#[test]
fn a_stopping_server_finishes_what_is_open_and_takes_nothing_new() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(2);
    let mut server = TestServer::with(engine, draining(20_000));
    let idle = TcpStream::connect(server.address).unwrap();
    let streaming = post_unread(server.address, COMPLETIONS, &json!({"prompt": "x", "stream": true}));
    let plain = post_unread(server.address, COMPLETIONS, &json!({"prompt": "x"}));
    wait_until("both are there", || control.added() == 2);
    server.stop();
    wait_until("health says so", || get(server.address, "/health").status == 503);
    assert_eq!(get(server.address, "/health").text(), "draining");
    assert_eq!(get(server.address, "/metrics").status, 200, "the last scrape");
    let refused = post(server.address, COMPLETIONS, &json!({"prompt": "x"}));
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
    assert_eq!(refused.json()["error"]["code"], "server_draining");
    control.allow(usize::MAX);
    let events = read_head(streaming).events();
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "stop");
    assert_eq!(read_head(plain).json()["choices"][0]["text"], " a cat sat");
    server.join();
    assert_eq!(control.added(), 2);
    assert!(TcpStream::connect(server.address).is_err(), "nobody listens");
    drop(idle);
}

#[test]
fn after_the_drain_timeout_open_requests_are_cancelled_with_an_error() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(4);
    let mut server = TestServer::with(engine, draining(300));
    let mut streaming = post(server.address, COMPLETIONS, &long(true));
    streaming.chunk().unwrap();
    let plain = post_unread(server.address, COMPLETIONS, &long(false));
    wait_until("both are there", || control.added() == 2);
    server.stop();
    let text = rest(streaming);
    let error = r#"data: {"error":{"message":"the server is stopping; try again later","type":"server_error","param":null,"code":"server_draining"}}"#;
    assert!(text.ends_with(&format!("{error}\n\ndata: [DONE]\n\n")), "{text}");
    let plain = read_head(plain);
    assert_eq!((plain.status, plain.header("retry-after")), (503, Some("1")));
    server.join();
    server.wait_idle();
    assert_eq!(control.cancelled(), 2);
}

#[test]
fn a_half_written_request_does_not_outlast_the_drain_timeout() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    let mut server = TestServer::with(engine, draining(200));
    let mut half = TcpStream::connect(server.address).unwrap();
    half.write_all(b"POST /v1/completions HTTP/1.1\r\nContent-Le").unwrap();
    post_ok(server.address, COMPLETIONS, &json!({"prompt": "x"}));
    let started = Instant::now();
    server.stop();
    server.join();
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert_eq!(control.added(), 1);
}
