//! A rolling update of two replicas behind a balancer answers every request.

use crate::support::balancer::Balancer;
use crate::support::client::get;
use crate::support::process::{Process, pegainfer};
use crate::support::wait_until;
use serde_json::json;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

const CLIENTS: usize = 4;
const TOKENS: usize = 24;
/// Time until the Service forgets a server that is being deleted.
const FORGOTTEN: Duration = Duration::from_millis(500);
/// Time of `preStop`: as in tools/deploy/kubernetes.yaml, longer than [`FORGOTTEN`].
const PRE_STOP: Duration = Duration::from_millis(1500);

fn replica() -> Process {
    let mut command = pegainfer();
    command.args(["serve", "--device", "cpu", "--threads", "1", "--log-level", "warn"]);
    Process::start_with_log(Stdio::null(), &mut command)
}

/// One streamed completion; says what is wrong with the response.
fn complete(address: SocketAddr) -> Result<(), String> {
    let body = json!({"prompt": "Once", "max_tokens": TOKENS, "ignore_eos": true, "stream": true}).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    let words = |error: std::io::Error| error.to_string();
    let mut stream = TcpStream::connect(address).map_err(words)?;
    stream.set_read_timeout(Some(Duration::from_secs(30))).map_err(words)?;
    stream.write_all((head + &body).as_bytes()).map_err(words)?;
    let mut response = String::new();
    stream.read_to_string(&mut response).map_err(words)?;
    match response.matches("data: {").count() == TOKENS && response.contains("data: [DONE]") {
        true => Ok(()),
        false => Err(format!("an incomplete response: {response:?}")),
    }
}

/// Ends the clients, even when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Replaces two replicas one after the other under load. Returns the number of complete responses and the errors.
fn roll(pre_stop: Duration) -> (usize, Vec<String>) {
    let mut replicas = vec![replica(), replica()];
    let balancer = Balancer::start(replicas.iter().map(|replica| replica.address).collect());
    let (stop, whole) = (AtomicBool::new(false), AtomicUsize::new(0));
    let errors = thread::scope(|scope| {
        let _stop = Stop(&stop);
        let client = || {
            let mut errors = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                match complete(balancer.address) {
                    Ok(()) => drop(whole.fetch_add(1, Ordering::Relaxed)),
                    Err(error) => {
                        errors.push(error);
                        thread::sleep(Duration::from_millis(5));
                    }
                }
            }
            errors
        };
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(client)).collect();
        wait_until("requests are complete", || whole.load(Ordering::Relaxed) >= 10);
        for old in std::mem::take(&mut replicas) {
            let new = replica();
            wait_until("the new server is ready", || get(new.address, "/health").status == 200);
            balancer.add(new.address);
            replicas.push(new);
            delete(old, &balancer, pre_stop);
        }
        let seen = whole.load(Ordering::Relaxed);
        wait_until("the new servers serve", || whole.load(Ordering::Relaxed) >= seen + 10);
        stop.store(true, Ordering::Relaxed);
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    (whole.into_inner(), errors)
}

/// Deletes a server as Kubernetes does: the Service forgets it while preStop and then SIGTERM reach it.
fn delete(mut server: Process, balancer: &Balancer, pre_stop: Duration) {
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(FORGOTTEN);
            balancer.remove(server.address);
        });
        thread::sleep(pre_stop);
        server.signal("-TERM");
    });
    assert_eq!(server.child.wait().unwrap().code(), Some(0), "it did not drain");
}

#[test]
fn every_request_is_answered() {
    let (whole, errors) = roll(PRE_STOP);
    assert!(errors.is_empty() && whole >= 20, "{whole} responses are complete, but: {errors:?}");
}

/// Shows that the test above sees a refused request.
#[test]
fn without_pre_stop_requests_are_refused() {
    let (_, errors) = roll(Duration::ZERO);
    assert!(!errors.is_empty(), "preStop is not needed");
}
