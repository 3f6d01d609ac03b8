//! Rights of callers: admins, host names, signals.

use crate::support::client::{get, post_unread, read_head, send};
use crate::support::mock::MockEngine;
use crate::support::process::{Process, pegainfer};
use crate::support::{TestServer, wait_until};
use pegainfer_server::app::Options;
use pegainfer_server::http::{AllowedHosts, ApiKeys, Cors, Secret, TrustedProxies};
use serde_json::json;
use std::io::{BufRead, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

const RESET: &str = "/reset_prefix_cache";

fn keys(key: &str) -> ApiKeys {
    ApiKeys::load(&[Secret(key.into())], None).unwrap()
}

#[test]
fn the_prefix_cache_is_for_admins() {
    let status = |options: Options, headers: &[(&str, &str)]| {
        let (engine, control) = MockEngine::replying(" a cat");
        let server = TestServer::with(engine, options);
        let status = send(server.address, "POST", RESET, headers, b"").status;
        assert_eq!(control.resets.load(Ordering::SeqCst), usize::from(status == 200));
        status
    };
    let (key, admin) = (("Authorization", "Bearer k"), ("Authorization", "Bearer a"));
    assert_eq!(status(Options::default(), &[]), 403, "it may be a proxy that does not say for whom it calls");
    let open = || Options { admin_local: true, ..Options::default() };
    assert_eq!(status(open(), &[]), 200, "a program of this machine");
    assert_eq!(status(open(), &[("Origin", "https://evil.example")]), 403, "a page in a browser");
    assert_eq!(status(open(), &[("X-Forwarded-For", "10.0.0.7")]), 403, "somebody behind a proxy");
    for site in ["cross-site", "same-site"] {
        assert_eq!(status(open(), &[("Sec-Fetch-Site", site)]), 403, "an image of a page, which has no Origin");
    }
    let proxies = || TrustedProxies::new(&["127.0.0.1".into()]).unwrap();
    let behind = || Options { trusted_proxies: proxies(), ..open() };
    assert_eq!(status(behind(), &[]), 403, "the proxy is nobody's program");
    let with_keys = || Options { api_keys: keys("k"), ..Options::default() };
    assert_eq!((status(with_keys(), &[]), status(with_keys(), &[key])), (401, 403));
    let with_admin = || Options { admin_keys: keys("a"), ..with_keys() };
    assert_eq!((status(with_admin(), &[key]), status(with_admin(), &[admin])), (403, 200));
    assert_eq!(status(with_admin(), &[admin, ("Sec-Fetch-Site", "cross-site")]), 403, "whatever key a page has");
}

#[test]
fn pages_of_other_sites_get_nothing_that_they_could_use() {
    let cors = Cors::new(&["https://chat.example".into()]).unwrap();
    let (engine, _) = MockEngine::replying(" a cat");
    let server = TestServer::with(engine, Options { admin_local: true, cors, ..Options::default() });
    let cross = ("Sec-Fetch-Site", "cross-site");
    let steps = send(server.address, "GET", "/debug/steps", &[cross], b"");
    assert_eq!((steps.status, steps.json()["error"]["code"].clone()), (403, json!("cross_site")));
    let body = json!({"prompt": "x"}).to_string();
    let complete = |more: &[(&str, &str)]| {
        let headers: Vec<(&str, &str)> = [("Content-Type", "application/json")].iter().chain(more).copied().collect();
        send(server.address, "POST", "/v1/completions", &headers, body.as_bytes())
    };
    assert_eq!(complete(&[cross]).status, 403);
    let allowed = complete(&[cross, ("Origin", "https://chat.example")]);
    assert_eq!((allowed.status, allowed.header("access-control-allow-origin")), (200, Some("https://chat.example")));
    for path in ["/v1/models", "/nowhere", "/health", "/ui/app.js"] {
        let response = get(server.address, path);
        assert_eq!(response.header("x-content-type-options"), Some("nosniff"), "{path}");
        assert_eq!(response.header("cross-origin-resource-policy"), Some("same-origin"), "{path}");
    }
}

#[test]
fn a_local_server_answers_to_local_names_only() {
    let (engine, _) = MockEngine::replying(" a cat");
    let allowed_hosts = AllowedHosts::new(&["llm.example".into()], true).unwrap();
    let server = TestServer::with(engine, Options { allowed_hosts, ..Options::default() });
    let ask = |head: &str| {
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes()).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    };
    for (head, status) in [
        ("GET /v1/models HTTP/1.1\r\nHost: localhost:8000\r\n", 200),
        ("GET /v1/models HTTP/1.1\r\nHost: llm.example\r\n", 200),
        ("GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n", 403),
        ("GET /health HTTP/1.1\r\nHost: pod-7:8000\r\n", 200),
        ("GET /v1/models HTTP/1.1\r\n", 400),
        ("GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n", 400),
        ("GET /v1/models HTTP/1.0\r\n", 200),
    ] {
        let response = ask(head);
        assert!(
            response.starts_with(&format!("HTTP/1.1 {status}")) || response.starts_with(&format!("HTTP/1.0 {status}")),
            "{head}{response}"
        );
    }
    assert!(ask("GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n").contains("--allowed-host evil.example"));
}

fn temp_file(name: &str, text: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("pegainfer-rights-{name}-{}", std::process::id()));
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    path
}

fn models(address: SocketAddr, key: &str) -> u16 {
    send(address, "GET", "/v1/models", &[("Authorization", &format!("Bearer {key}"))], b"").status
}

#[test]
fn signals_reload_keys_and_do_not_break_streams() {
    let path = temp_file("keys", "old\n");
    let mut server = Process::start(
        pegainfer()
            .args(["--host", "0.0.0.0", "--admin-key-file", path.to_str().unwrap()])
            .env("PEGAINFER_API_KEY", "env"),
    );
    let address = SocketAddr::from(([127, 0, 0, 1], server.address.port()));
    assert_eq!((models(address, "old"), models(address, "new"), models(address, "env")), (200, 401, 200));
    let body = json!({"prompt": "Once upon a time", "max_tokens": 600, "ignore_eos": true, "stream": true}).to_string();
    let headers = [("Content-Type", "application/json"), ("x-api-key", "env")];
    let mut stream = send(address, "POST", "/v1/completions", &headers, body.as_bytes());
    assert!(stream.chunk().is_some());
    std::fs::write(&path, "new\n").unwrap();
    for signal in ["-USR1", "-USR2", "-ALRM", "-XFSZ", "-HUP"] {
        server.signal(signal);
    }
    wait_until("the new key is in use", || models(address, "new") == 200);
    assert_eq!((models(address, "old"), models(address, "env")), (401, 200));
    std::fs::write(&path, "\n").unwrap();
    server.signal("-HUP");
    let mut log = String::new();
    while !log.contains("the admin keys stay as they are") {
        assert!(server.log.read_line(&mut log).unwrap() > 0, "{log}");
    }
    assert_eq!(models(address, "new"), 200, "a bad file changes nothing");
    assert!(log.contains("can be read by every user of this machine: chmod 600"), "{log}");
    assert!(log.contains("requests without a valid API key, the last one from 127.0.0.1"), "{log}");
    assert!(stream.text().ends_with("data: [DONE]\n\n"), "the stream is whole");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_public_server_without_keys_says_so() {
    let mut server = Process::start_with_log(std::process::Stdio::piped(), pegainfer().args(["--host", "0.0.0.0"]));
    let mut log = String::new();
    server.child.kill().unwrap();
    server.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert!(log.contains("everybody who can reach 0.0.0.0 may use this server: give --api-key-file"), "{log}");
}

#[test]
fn a_large_body_without_a_key_is_refused_and_not_cut_off() {
    let (engine, _) = MockEngine::replying(" a cat");
    let server = TestServer::with(engine, Options { api_keys: keys("k"), ..Options::default() });
    let body = json!({"prompt": "x".repeat(20 << 20)});
    assert_eq!(read_head(post_unread(server.address, "/v1/completions", &body)).status, 401);
    assert_eq!(get(server.address, "/health").status, 200);
}
