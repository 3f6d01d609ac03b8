//! A load balancer that sends each connection to the next of its servers, as a Service of Kubernetes does.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// A balancer on a free port, until the process ends.
pub struct Balancer {
    pub address: SocketAddr,
    servers: Arc<Mutex<Vec<SocketAddr>>>,
}

impl Balancer {
    /// Balances between `servers`.
    pub fn start(servers: Vec<SocketAddr>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let servers = Arc::new(Mutex::new(servers));
        let shared = servers.clone();
        thread::spawn(move || {
            for (i, client) in listener.incoming().flatten().enumerate() {
                let server = {
                    let servers = shared.lock().unwrap();
                    servers[i % servers.len()]
                };
                // A server that is gone closes the connection of its client.
                let Ok(upstream) = TcpStream::connect(server) else { continue };
                let request = [client.try_clone().unwrap(), upstream.try_clone().unwrap()];
                thread::spawn(move || copy(request));
                thread::spawn(move || copy([upstream, client]));
            }
        });
        Self { address, servers }
    }

    /// Adds a server for new connections.
    pub fn add(&self, server: SocketAddr) {
        self.servers.lock().unwrap().push(server);
    }

    /// Removes a server; open connections stay.
    pub fn remove(&self, server: SocketAddr) {
        self.servers.lock().unwrap().retain(|other| *other != server);
    }
}

/// Copies until the end, and passes it on.
fn copy([mut from, mut to]: [TcpStream; 2]) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
