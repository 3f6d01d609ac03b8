//! A reverse proxy that closes connections on which the server is silent for a time.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// Starts a proxy in front of `server` and returns its address. It serves until the process ends.
pub fn start(server: SocketAddr, idle: Duration) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let client = client.unwrap();
            let upstream = TcpStream::connect(server).unwrap();
            upstream.set_read_timeout(Some(idle)).unwrap();
            let request = [client.try_clone().unwrap(), upstream.try_clone().unwrap()];
            std::thread::spawn(move || copy(request));
            std::thread::spawn(move || copy([upstream, client]));
        }
    });
    address
}

/// Copies until the end or until nothing arrives in time, then closes both.
fn copy([mut from, mut to]: [TcpStream; 2]) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    // The other direction may have closed them.
    let _ = (to.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both));
}
