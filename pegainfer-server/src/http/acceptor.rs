//! Accepts connections, up to the limit of open connections.

use super::forwarded::TrustedProxies;
use super::guard::Peer;
use super::open_connections::{OpenConnection, OpenConnections};
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

/// Delay before accepting again after the process ran out of file descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(10);
/// Minimum time between two log lines about connections that cannot be accepted.
const LOG_INTERVAL: Duration = Duration::from_secs(1);
/// Unsent bytes per connection that the kernel buffers. Its default is megabytes, which no budget would count.
#[cfg(target_os = "linux")]
const MAX_UNSENT: libc::c_int = 128 << 10;

/// Version of HTTP that a port speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2, for gRPC.
    Http2,
}

/// Accepts connections, up to the limit of open connections.
pub(super) struct Acceptor {
    listener: TcpListener,
    open: Arc<OpenConnections>,
    /// Trusted proxies; one connection of a proxy serves many clients.
    proxies: TrustedProxies,
    /// Time of the last log line about a refused connection.
    logged: Option<Instant>,
    /// Connections refused since that line.
    refused: usize,
}

impl Acceptor {
    pub fn new(listener: TcpListener, open: Arc<OpenConnections>, proxies: TrustedProxies) -> Self {
        Self { listener, open, proxies, logged: None, refused: 0 }
    }

    /// The next connection. If too many are open, waiting ones are closed for it. If all are being served, it is
    /// refused.
    pub async fn accept(&mut self) -> (TcpStream, Peer, OpenConnection) {
        loop {
            match self.listener.accept().await {
                Ok((stream, address)) => {
                    let peer = Peer(address.ip());
                    match self.open.open(Some(peer).filter(|Peer(ip)| !self.proxies.contains(*ip))) {
                        Some(open) => {
                            prepare(&stream);
                            return (stream, peer, open);
                        }
                        None => self.log("every connection that may be open is being served (--max-connections)"),
                    }
                }
                // The client left before it was accepted.
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset) => {}
                Err(error) => {
                    self.open.close_some();
                    self.log(&error.to_string());
                    sleep(ACCEPT_RETRY).await;
                }
            }
        }
    }

    /// Logs that a connection was not accepted, at most once a second.
    fn log(&mut self, why: &str) {
        self.refused += 1;
        if self.logged.is_none_or(|logged| logged.elapsed() >= LOG_INTERVAL) {
            log::warn!("{} connections could not be accepted: {why}", self.refused);
            (self.logged, self.refused) = (Some(Instant::now()), 0);
        }
    }
}

/// Sets the options of a client's socket.
fn prepare(stream: &TcpStream) {
    // Tokens are small writes. With Nagle's algorithm each would wait for the acknowledgement of the previous one.
    if let Err(error) = stream.set_nodelay(true) {
        log::debug!("TCP_NODELAY cannot be set: {error}");
    }
    if let Err(error) = limit_unsent(stream) {
        log::debug!("TCP_NOTSENT_LOWAT cannot be set: {error}");
    }
}

#[cfg(target_os = "linux")]
fn limit_unsent(stream: &TcpStream) -> std::io::Result<()> {
    use std::os::fd::AsRawFd;
    let (max_unsent, size) = (MAX_UNSENT, size_of_val(&MAX_UNSENT) as libc::socklen_t);
    let option = libc::TCP_NOTSENT_LOWAT;
    // SAFETY: the socket is open while `stream` is borrowed, and `max_unsent` is an int of the size that is given.
    let result = unsafe {
        libc::setsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, option, (&raw const max_unsent).cast(), size)
    };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Other systems keep their default.
#[cfg(not(target_os = "linux"))]
fn limit_unsent(_: &TcpStream) -> std::io::Result<()> {
    Ok(())
}
