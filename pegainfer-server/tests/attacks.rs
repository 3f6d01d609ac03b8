//! Attacks on memory and time, scaled down: what a hostile client sends must cost other clients nothing.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;
use support::attack::Target;

/// Announces a body of `length` bytes and sends only `body`.
fn announce(address: SocketAddr, length: usize, body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    stream
}

#[test]
fn memory_is_bounded() {
    let mut target = Target::start(&[]);
    target.attack("1,700 bodies of 8 MB are announced and none is sent", |address| {
        let open: Vec<TcpStream> = (0..1700).map(|_| announce(address, 8_000_000, b"{")).collect();
        std::thread::sleep(Duration::from_millis(500));
        drop(open);
    });
}
