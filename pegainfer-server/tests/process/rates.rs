//! Rates of API keys: requests beyond them are refused, in the shape of the called API.

use crate::support::client::{Response, get, send};
use crate::support::process::{Process, pegainfer};
use crate::support::temp_dir::TempDir;
use crate::support::wait_until;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// A server with a key file of these lines. Returns the path of the file.
fn server(dir: &TempDir, lines: &str) -> (Process, PathBuf) {
    let path = dir.0.join("keys");
    std::fs::write(&path, lines).unwrap();
    (Process::start(pegainfer().arg("--api-key-file").arg(&path)), path)
}

fn ask(address: SocketAddr, key: &str, path: &str, body: &Value) -> Response {
    let headers = [("Content-Type", "application/json"), ("x-api-key", key)];
    send(address, "POST", path, &headers, body.to_string().as_bytes())
}

fn complete(address: SocketAddr, key: &str, max_tokens: usize) -> Response {
    ask(address, key, "/v1/completions", &json!({"prompt": "x", "max_tokens": max_tokens, "ignore_eos": true}))
}

#[test]
fn a_key_has_so_many_requests_a_minute() {
    let dir = TempDir::new("rpm");
    let (server, path) = server(&dir, "slow rpm=60\nfree\n");
    let address = server.address;
    let refused = (0..500).map(|_| complete(address, "slow", 1)).find(|response| response.status != 200).unwrap();
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    let error = refused.json()["error"].clone();
    assert_eq!((&error["type"], &error["code"]), (&json!("invalid_request_error"), &json!("rate_limit_exceeded")));
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("60 requests a minute (rpm=60 on its line of the key file)"), "{message}");
    let models = |key: &str| send(address, "GET", "/v1/models", &[("x-api-key", key)], b"").status;
    assert_eq!((models("slow"), complete(address, "free", 1).status), (200, 200), "what is small, and other keys");
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(complete(address, "slow", 1).status, 200, "after the time of Retry-After");

    let messages = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1});
    let refused =
        (0..9).map(|_| ask(address, "slow", "/v1/messages", &messages)).find(|response| response.status != 200);
    assert_eq!(refused.unwrap().json()["error"]["type"], "rate_limit_error", "Anthropic's shape");
    let metrics = get(address, "/metrics").text();
    let counted = |line: &&str| line.contains("reason=\"rpm\"") || line.contains("reason=\"rate_limit_exceeded\"");
    assert_eq!(metrics.lines().filter(counted).count(), 2, "{metrics}");

    std::fs::write(&path, "slow rpm=600\nnew rpm=1\n").unwrap();
    server.signal("-HUP");
    wait_until("the new key is in use", || complete(address, "new", 1).status == 200);
    let refused = complete(address, "new", 1);
    assert!(refused.status == 429 && refused.header("retry-after").unwrap().parse::<u64>().unwrap() > 50);
    assert!((0..100).all(|_| complete(address, "slow", 1).status == 200), "it has another rate");
    assert_eq!(complete(address, "free", 1).status, 401);
}

#[test]
fn a_key_has_so_many_tokens_a_minute() {
    let dir = TempDir::new("tpm");
    let (server, _) = server(&dir, "slow tpm=60\nfree");
    let address = server.address;
    let refused = complete(address, "slow", 100);
    assert_eq!(refused.status, 400, "it could never be served");
    let error = refused.json()["error"].clone();
    assert_eq!((&error["code"], &error["param"]), (&json!("exceeds_token_rate"), &json!("max_tokens")));
    assert!(error["message"].as_str().unwrap().contains("101 tokens"), "{error}");
    assert!(error["message"].as_str().unwrap().contains("(tpm=60 on its line of the key file)"), "{error}");
    let choices = json!({"prompt": "x", "max_tokens": 20, "n": 3, "ignore_eos": true});
    assert_eq!(ask(address, "slow", "/v1/completions", &choices).status, 400, "all choices count");

    assert_eq!(complete(address, "slow", 50).status, 200);
    let refused = complete(address, "slow", 40);
    let seconds: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!(refused.status == 429 && (20..=32).contains(&seconds), "9 of 41 tokens are left: {seconds} s");
    let message = refused.json()["error"]["message"].as_str().unwrap().to_string();
    assert!(message.contains("60 tokens a minute (tpm=60 on its line of the key file)"), "{message}");
    assert_eq!(complete(address, "free", 100).status, 200);
}

#[test]
fn tokens_that_are_not_generated_are_given_back() {
    let dir = TempDir::new("tpm-back");
    let (server, _) = server(&dir, "slow tpm=200");
    // The first token ends the answer, although each request asks for 150.
    let body = json!({"prompt": "x", "max_tokens": 150, "allowed_token_ids": [70], "stop_token_ids": [70]});
    for _ in 0..10 {
        let response = ask(server.address, "slow", "/v1/completions", &body);
        let (status, text) = (response.status, response.text());
        assert_eq!(status, 200, "{text}");
    }
}
