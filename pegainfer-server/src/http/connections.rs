//! Accepts connections, serves them, and drains them at the end.

use super::guard::Peer;
use super::stall::StallGuard;
use super::tls::Tls;
use crate::lifecycle::{Lifecycle, Phase};
use axum::middleware::AddExtension;
use axum::serve::Listener;
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tower::Layer;

type PeerRouter = AddExtension<Router, Peer>;

/// Time in which cancelled requests may still send their error to the client.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How the server treats its connections.
pub struct Server {
    /// Time for which a client may be inactive: read no byte of a response, or not complete the head of its next request.
    pub client_timeout: Duration,
    /// Time that open requests have to finish after the signal to stop.
    pub drain_timeout: Duration,
    /// Certificate and key; `None` serves plain HTTP.
    pub tls: Option<Tls>,
    /// Tells everybody when the server drains and closes.
    pub lifecycle: Lifecycle,
    /// Number of requests that are running or waiting, for the log.
    pub open_requests: Box<dyn Fn() -> usize + Send + Sync>,
}

/// Serves until `stop` is ready, then lets open requests finish for at most the drain timeout. During the drain, `/health`
/// and every new request get 503, so that load balancers stop sending requests here.
pub async fn serve(mut listener: TcpListener, app: Router, server: Server, stop: impl Future<Output = ()>) {
    let server = Arc::new(server);
    let mut stop = pin!(stop);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            (stream, peer) = Listener::accept(&mut listener) => {
                connections.spawn(connection(stream, of_peer(&app, peer), server.clone()));
            }
            Some(_) = connections.join_next() => {}
            () = &mut stop => break,
        }
    }
    server.lifecycle.advance(Phase::Draining);
    let limit = server.drain_timeout;
    log::info!("stopping: {} open requests have {} s to finish", (server.open_requests)(), limit.as_secs_f64());
    // Connections accepted while draining: the drain does not wait for them.
    let mut late = JoinSet::new();
    let mut limit = pin!(tokio::time::sleep(limit));
    loop {
        tokio::select! {
            (stream, peer) = Listener::accept(&mut listener) => {
                late.spawn(connection(stream, of_peer(&app, peer), server.clone()));
            }
            Some(_) = late.join_next() => {}
            ended = connections.join_next() => if ended.is_none() { return },
            () = &mut limit => break,
        }
    }
    log::warn!("{} requests were still open and are cancelled", (server.open_requests)());
    server.lifecycle.advance(Phase::Closing);
    // Connections that remain after this belong to clients that do not read.
    let _ = timeout(LAST_WORDS, async { while connections.join_next().await.is_some() {} }).await;
}

/// The router with the client's address attached to every request.
fn of_peer(app: &Router, peer: SocketAddr) -> PeerRouter {
    Extension(Peer(peer.ip())).layer(app.clone())
}

async fn connection(stream: TcpStream, app: PeerRouter, server: Arc<Server>) {
    // Tokens are small writes: with Nagle's algorithm each would wait for the acknowledgement of the previous one.
    if let Err(error) = stream.set_nodelay(true) {
        log::debug!("TCP_NODELAY cannot be set: {error}");
    }
    let Some(tls) = server.tls.clone() else { return serve_connection(stream, app, server).await };
    match timeout(server.client_timeout, tls.acceptor().accept(stream)).await {
        Ok(Ok(stream)) => serve_connection(stream, app, server).await,
        Ok(Err(error)) => log::debug!("a TLS handshake failed: {error}"),
        Err(_) => log::debug!("a client did not complete the TLS handshake in time"),
    }
}

/// Serves the requests of one connection.
async fn serve_connection(stream: impl AsyncRead + AsyncWrite + Unpin + Send, app: PeerRouter, server: Arc<Server>) {
    let client_timeout = server.client_timeout;
    let late = server.lifecycle.phase() != Phase::Serving;
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(client_timeout).keep_alive(!late);
    let io = TokioIo::new(StallGuard::new(stream, client_timeout));
    let mut serving = pin!(http.serve_connection(io, TowerToHyperService::new(app)));
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = server.lifecycle.reached(Phase::Draining), if !late => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        log::debug!("a connection broke: {error}");
    }
}
