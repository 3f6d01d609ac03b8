//! Slow, silent or numerous clients do not affect other requests.

use crate::support::client::{Response, get, post, post_ok, post_unread, read_head, write};
use crate::support::mock::{Control, MockEngine};
use crate::support::process::{Process, pegainfer};
use crate::support::{Setup, TestServer, wait_until};
use pegainfer_server::app::Options;
use pegainfer_server::http::{ApiKeys, Secret, raise_open_files};
use pegainfer_server::limits::Limits;
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

const COMPLETIONS: &str = "/v1/completions";
/// The client timeout of these tests.
const LIMIT: Duration = Duration::from_millis(500);

fn server() -> TestServer {
    let (engine, _) = MockEngine::replying(" a cat sat on a mat");
    let limits = Limits { min_body_rate: 1, ..Limits::default() };
    let options = Options { client_timeout: LIMIT, max_body: Some(10_000), limits, ..Options::default() };
    TestServer::start(engine, Setup { options, max_queued: 128, ..Setup::default() })
}

/// Checks that an ordinary client is served, plain and streamed.
fn others_are_served(address: SocketAddr) {
    let started = Instant::now();
    let mut body = json!({"prompt": "x", "max_tokens": 20, "ignore_eos": true});
    assert_eq!(post_ok(address, COMPLETIONS, &body)["usage"]["completion_tokens"], 20);
    body["stream"] = true.into();
    assert_eq!(post(address, COMPLETIONS, &body).events().len(), 20);
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

/// The bytes received until the server closes the connection, which it must do.
fn until_closed(mut connection: TcpStream) -> String {
    connection.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut bytes = vec![];
    match connection.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(e) => assert_eq!(e.kind(), ErrorKind::ConnectionReset, "{e}"),
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn a_client_that_reads_one_byte_a_second_slows_nobody() {
    let server = server();
    let body = json!({"prompt": "x", "max_tokens": 400, "ignore_eos": true, "stream": true});
    let mut slow = post_unread(server.address, COMPLETIONS, &body);
    let mut byte = [0];
    slow.read_exact(&mut byte).unwrap();
    server.wait_idle();
    for _ in 0..2 {
        others_are_served(server.address);
        std::thread::sleep(Duration::from_secs(1));
        slow.read_exact(&mut byte).unwrap();
    }
    let text = until_closed(slow);
    assert_eq!(text.matches("data: {").count(), 400);
    assert!(text.contains("data: [DONE]"), "slow is not dead: it gets everything");
}

/// A request with a response larger than the buffers of both sockets.
fn large_stream() -> Value {
    json!({"prompt": vec!["x"; 64], "max_tokens": 480, "ignore_eos": true, "stream": true, "logprobs": 20})
}

#[test]
fn a_client_that_lets_output_pile_up_has_to_read_it() {
    let server = server();
    let mut slow = post_unread(server.address, COMPLETIONS, &large_stream());
    let (started, mut byte) = (Instant::now(), [0]);
    // A trickle: some progress within every client timeout, but less than 1,024 bytes a second.
    while started.elapsed() < 6 * LIMIT {
        slow.read_exact(&mut byte).unwrap();
        std::thread::sleep(LIMIT / 20);
    }
    others_are_served(server.address);
    let text = until_closed(slow);
    assert!(!text.contains("data: [DONE]"), "the server waited for it: {} bytes", text.len());
    server.wait_idle();
}

/// A server with two keys and a budget of a MiB for output.
fn server_with_small_budget() -> (TestServer, Arc<Control>) {
    let (engine, control) = MockEngine::replying(" a cat sat on a mat");
    let api_keys = ApiKeys::load(&["slow", "other"].map(|key| Secret(key.into())), None).unwrap();
    let limits = Limits { max_inflight_bytes: 1 << 20, ..Limits::default() };
    let options = Options { api_keys, limits, ..Options::default() };
    (TestServer::start(engine, Setup { options, max_queued: 1024, ..Setup::default() }), control)
}

fn post_with_key(server: &TestServer, key: &str, path: &str, body: &Value) -> TcpStream {
    let headers = [("Content-Type", "application/json"), ("x-api-key", key)];
    write(server.address, "POST", path, &headers, body.to_string().as_bytes())
}

/// A request with a response that counts as 544 KB while it is collected.
fn large_plain() -> Value {
    json!({"prompt": "x", "logprobs": 20, "max_tokens": 400, "ignore_eos": true})
}

#[test]
fn output_that_nobody_reads_stays_within_its_budget_and_harms_no_other_key() {
    let (server, _) = server_with_small_budget();
    let unread = |server: &TestServer| {
        let metrics = get(server.address, "/metrics").text();
        let value = |part: &str| {
            let line = metrics.lines().find(|line| !line.starts_with('#') && line.contains(part))?;
            line.rsplit(' ').next()?.parse::<f64>().ok()
        };
        (value("pegainfer:unread_output_bytes").unwrap(), value("reason=\"unread_output\"").unwrap_or(0.0))
    };
    let silent: Vec<TcpStream> = (0..6).map(|_| post_with_key(&server, "slow", COMPLETIONS, &large_stream())).collect();
    wait_until("connections are closed for what they leave unread", || unread(&server).1 >= 5.0);
    assert!(unread(&server).0 <= f64::from(1 << 20), "{} bytes", unread(&server).0);
    for _ in 0..3 {
        let response = read_head(post_with_key(&server, "other", COMPLETIONS, &large_plain()));
        assert_eq!(response.status, 200);
        assert_eq!(response.json()["usage"]["completion_tokens"], 400);
    }
    drop(silent);
    server.wait_idle();
    wait_until("nothing waits", || unread(&server).0 == 0.0);
}

#[test]
fn large_responses_that_nobody_reads_leave_others_their_share() {
    let (server, _) = server_with_small_budget();
    let texts = json!({"tokens": vec![5; 400_000]});
    let silent: Vec<TcpStream> = (0..12).map(|_| post_with_key(&server, "slow", "/detokenize", &texts)).collect();
    std::thread::sleep(LIMIT);
    for _ in 0..3 {
        let response = read_head(post_with_key(&server, "other", COMPLETIONS, &large_plain()));
        assert_eq!((response.status, response.json()["usage"]["completion_tokens"].as_u64()), (200, Some(400)));
    }
    drop(silent);
}

#[test]
fn a_client_that_never_reads_is_dropped() {
    let server = server();
    let silent = post_unread(server.address, COMPLETIONS, &large_stream());
    others_are_served(server.address);
    server.wait_idle();
    std::thread::sleep(6 * LIMIT);
    others_are_served(server.address);
    let text = until_closed(silent);
    assert!(text.starts_with("HTTP/1.1 200"), "it was served what the buffers hold");
    assert!(!text.contains("data: [DONE]"), "the server waited for ever: {} bytes", text.len());
}

#[test]
fn a_request_with_an_endless_head_is_dropped() {
    let server = server();
    let mut half = TcpStream::connect(server.address).unwrap();
    half.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n").unwrap();
    let mut dripping = TcpStream::connect(server.address).unwrap();
    others_are_served(server.address);
    // A trickle does not help: the whole head has to arrive in time.
    let started = Instant::now();
    while dripping.write_all(b"G").is_ok() {
        assert!(started.elapsed() < Duration::from_secs(10), "a head may take for ever");
        std::thread::sleep(LIMIT / 10);
    }
    assert!(!until_closed(half).contains(" 200 "));
    others_are_served(server.address);
}

#[test]
fn a_request_with_an_endless_body_gets_an_error() {
    let server = server();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n";
    let mut half = TcpStream::connect(server.address).unwrap();
    half.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    half.write_all(head.as_bytes()).unwrap();
    half.write_all(b"{\"prompt\": ").unwrap();
    others_are_served(server.address);
    let response = read_head(half);
    assert_eq!(response.status, 408);
    assert_eq!(response.json()["error"]["message"], "no byte of the request body came for 0.5 s");
}

#[test]
fn a_body_that_comes_in_drips_is_read_at_the_least_rate() {
    for (min_body_rate, status) in [(5, 200), (5000, 408)] {
        let limits = Limits { min_body_rate, ..Limits::default() };
        let (engine, _) = MockEngine::replying(" a cat sat on a mat");
        let server = TestServer::with(engine, Options { client_timeout: LIMIT, limits, ..Options::default() });
        let response = drip(server.address);
        assert_eq!(response.status, status);
        if status == 408 {
            let message = response.json()["error"]["message"].as_str().unwrap().to_string();
            assert!(message.contains("at least 5000 bytes/s are expected (--min-body-rate)"), "{message}");
        }
    }
}

/// Sends a body one byte at a time, at intervals of a tenth of the client timeout.
fn drip(address: SocketAddr) -> Response {
    let body = br#"{"prompt": "x"}"#;
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let mut slow = TcpStream::connect(address).unwrap();
    slow.write_all(head.as_bytes()).unwrap();
    for byte in body {
        // The refusal may arrive first.
        let _ = slow.write_all(&[*byte]);
        std::thread::sleep(LIMIT / 10);
    }
    read_head(slow)
}

#[test]
fn the_largest_body_is_the_operators_choice() {
    let server = server();
    let body = |length: usize| json!({"prompt": "x", "user": "u".repeat(length)});
    post_ok(server.address, COMPLETIONS, &body(9_000));
    let refused = post(server.address, COMPLETIONS, &body(10_000));
    assert_eq!(refused.status, 413);
    let message = refused.json()["error"]["message"].clone();
    assert_eq!(message, "the request body is larger than the limit of 10000 bytes (--max-body-size)");
}

#[test]
fn two_thousand_idle_connections_cost_nothing_and_go() {
    raise_open_files();
    // A separate process: the two ends of all connections are more files than some systems allow per process.
    let server = Process::start(pegainfer().args(["--client-timeout", "3"]));
    let idle: Vec<TcpStream> = (0..2000).map(|_| TcpStream::connect(server.address).unwrap()).collect();
    let response = post_ok(server.address, COMPLETIONS, &json!({"prompt": "x", "max_tokens": 4, "ignore_eos": true}));
    assert_eq!(response["usage"]["completion_tokens"], 4);
    assert_eq!(get(server.address, "/health").status, 200);
    for connection in idle {
        assert_eq!(until_closed(connection), "");
    }
}
