//! A server that is killed under load restarts on the same port, and its clients continue.

use crate::support::client::get;
use crate::support::process::{Process, pegainfer};
use crate::support::wait_until;
use serde_json::json;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

const CLIENTS: usize = 6;
const TOKENS: usize = 12;

/// One streamed completion; `None` if the connection is refused or breaks off.
fn complete(address: SocketAddr) -> Option<String> {
    let body = json!({"prompt": "Once", "max_tokens": TOKENS, "ignore_eos": true, "stream": true}).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all((head + &body).as_bytes()).ok()?;
    let mut response = String::new();
    stream.read_to_string(&mut response).ok()?;
    response.contains("data: [DONE]").then_some(response)
}

/// Completes prompts until `stop`. Counts complete responses and failures.
fn client(address: SocketAddr, stop: &AtomicBool, whole: &AtomicUsize, broken: &AtomicUsize) {
    while !stop.load(Ordering::Relaxed) {
        match complete(address) {
            Some(response) => {
                assert_eq!(response.matches("data: {").count(), TOKENS, "{response}");
                whole.fetch_add(1, Ordering::Relaxed);
            }
            None => {
                broken.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// Ends the clients, even when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A command without request log lines: nobody reads the log, and a full pipe would block the server.
fn quiet() -> Command {
    let mut command = pegainfer();
    command.args(["--log-level", "warn,pegainfer_server::cli::serve=info"]);
    command
}

#[test]
fn kill_9_and_restart_under_load() {
    let mut server = Process::start(&mut quiet());
    let address = server.address;
    let (stop, whole, broken) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let done = || whole.load(Ordering::Relaxed);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        for _ in 0..CLIENTS {
            scope.spawn(|| client(address, &stop, &whole, &broken));
        }
        wait_until("requests are complete", || done() >= 50);
        for _ in 0..2 {
            server.signal("-KILL");
            server.child.wait().unwrap();
            let (seen, failed) = (done(), broken.load(Ordering::Relaxed));
            wait_until("clients notice", || broken.load(Ordering::Relaxed) > failed);
            server = Process::start_on(address.port(), &mut quiet());
            // Servers have been seen to come back and to stop again after about a hundred requests.
            wait_until("the new server serves", || done() >= seen + 300);
            assert_eq!(get(address, "/health").status, 200);
        }
    });
    wait_until("nothing is left running", || {
        let metrics = get(address, "/metrics").text();
        ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"].iter().all(|name| {
            metrics
                .lines()
                .any(|line| line.starts_with(name) && line.split(' ').next_back().unwrap().parse() == Ok(0.0))
        })
    });
}
