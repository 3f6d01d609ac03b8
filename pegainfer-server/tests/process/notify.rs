//! systemd's notify protocol.

use crate::support::process::{Process, pegainfer};
use crate::support::temp_dir::TempDir;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

/// The messages until one of them is `last`.
fn until(socket: &UnixDatagram, last: &str) -> Vec<String> {
    let mut messages = Vec::new();
    while messages.last().map(String::as_str) != Some(last) {
        let mut message = [0; 256];
        let length = socket.recv(&mut message).unwrap_or_else(|error| panic!("{error} after {messages:?}"));
        messages.push(String::from_utf8_lossy(&message[..length]).trim().to_owned());
    }
    messages
}

#[test]
fn systemd_is_told_when_the_server_is_ready_healthy_and_stopping() {
    let dir = TempDir::new("notify");
    let path = dir.0.join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut server = Process::start(
        pegainfer().args(["serve", "--device", "cpu"]).env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "200000"),
    );
    assert_eq!(until(&socket, "READY=1"), ["READY=1"]);
    for _ in 0..3 {
        assert_eq!(until(&socket, "WATCHDOG=1"), ["WATCHDOG=1"], "twice in each interval");
    }
    server.signal("-TERM");
    until(&socket, "STOPPING=1");
    assert!(server.child.wait().unwrap().success());
}
