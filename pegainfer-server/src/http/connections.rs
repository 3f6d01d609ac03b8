//! Accepts connections, serves them, and drains them at the end.

use super::guard::{Peer, is_open};
use super::open_connections::{OpenConnection, OpenConnections};
use super::stall::StallGuard;
use super::tls::Tls;
use crate::error::ApiError;
use crate::lifecycle::{Lifecycle, Phase};
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures_util::future::{Either, ready};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::io::ErrorKind;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Size of the head of a request, and of what is read of a body at a time, at most.
const MAX_HEAD: usize = 64 << 10;
/// Time between two tries to accept a connection when the process has no file left.
const ACCEPT_AGAIN: Duration = Duration::from_millis(10);
/// Time between two log lines about connections that cannot be accepted.
const ACCEPT_LOG: Duration = Duration::from_secs(1);
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
    /// Connections that may be open at the same time.
    pub max_connections: usize,
    /// Tells everybody when the server drains and closes.
    pub lifecycle: Lifecycle,
    /// Number of requests that are running or waiting, for the log.
    pub open_requests: Box<dyn Fn() -> usize + Send + Sync>,
}

/// Serves until `stop` is ready, then lets open requests finish for at most the drain timeout. During the drain, `/health`
/// and every new request get 503, so that load balancers stop sending requests here.
pub async fn serve(listener: TcpListener, app: Router, server: Server, stop: impl Future<Output = ()>) {
    let mut acceptor = Acceptor::new(listener, server.max_connections);
    let server = Arc::new(server);
    let mut stop = pin!(stop);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            (stream, peer, open) = acceptor.accept() => {
                connections.spawn(connection(stream, peer, open, app.clone(), server.clone()));
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
            (stream, peer, open) = acceptor.accept() => {
                late.spawn(connection(stream, peer, open, app.clone(), server.clone()));
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

/// The refusal of a request on a connection beyond the limit.
fn over_capacity() -> Response {
    let message = "every connection that may be open is being served (--max-connections); try again later";
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("server_overloaded").into_response()
}

/// Accepts connections, up to the limit of open connections.
struct Acceptor {
    listener: TcpListener,
    open: Arc<OpenConnections>,
    /// When a connection could not be accepted or had to be refused, and was logged.
    logged: Option<Instant>,
    /// Connections since then that could not be accepted or had to be refused.
    refused: usize,
}

impl Acceptor {
    fn new(listener: TcpListener, max_connections: usize) -> Self {
        Self { listener, open: OpenConnections::new(max_connections), logged: None, refused: 0 }
    }

    /// The next connection. Waiting connections are closed for it where there are too many; where all are being served, it
    /// is refused.
    async fn accept(&mut self) -> (TcpStream, Peer, OpenConnection) {
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => match self.open.open() {
                    Some(open) => return (stream, Peer(peer.ip()), open),
                    None => self.log("every open connection is being served (--max-connections)"),
                },
                // The client was gone before it was accepted.
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset) => {}
                Err(error) => {
                    self.open.close_some();
                    self.log(&error.to_string());
                    sleep(ACCEPT_AGAIN).await;
                }
            }
        }
    }

    /// Logs that a connection was not accepted, once a second at most.
    fn log(&mut self, why: &str) {
        self.refused += 1;
        if self.logged.is_none_or(|logged| logged.elapsed() >= ACCEPT_LOG) {
            log::warn!("{} connections could not be accepted: {why}", self.refused);
            (self.logged, self.refused) = (Some(Instant::now()), 0);
        }
    }
}

async fn connection(stream: TcpStream, peer: Peer, open: OpenConnection, app: Router, server: Arc<Server>) {
    // Tokens are small writes: with Nagle's algorithm each would wait for the acknowledgement of the previous one.
    if let Err(error) = stream.set_nodelay(true) {
        log::debug!("TCP_NODELAY cannot be set: {error}");
    }
    let serving = async {
        let Some(tls) = server.tls.clone() else { return serve_connection(stream, peer, &open, app, &server).await };
        match timeout(server.client_timeout, tls.acceptor().accept(stream)).await {
            Ok(Ok(stream)) => serve_connection(stream, peer, &open, app, &server).await,
            Ok(Err(error)) => log::debug!("a TLS handshake failed: {error}"),
            Err(_) => log::debug!("a client did not complete the TLS handshake in time"),
        }
    };
    tokio::select! {
        () = serving => {}
        () = open.closed() => log::debug!("a waiting connection was closed for a new one (--max-connections)"),
    }
}

/// Serves the requests of one connection.
async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send,
    peer: Peer,
    open: &OpenConnection,
    app: Router,
    server: &Server,
) {
    let client_timeout = server.client_timeout;
    let late = server.lifecycle.phase() != Phase::Serving;
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(client_timeout)
        .keep_alive(!late && !open.is_extra())
        .max_buf_size(MAX_HEAD);
    let io = TokioIo::new(StallGuard::new(stream, client_timeout));
    let app = TowerToHyperService::new(app);
    let service = service_fn(|request: hyper::Request<hyper::body::Incoming>| {
        let mut request: Request = request.map(|body| open.receive(Body::new(body)));
        request.extensions_mut().insert(peer);
        let refused = open.is_extra() && !is_open(request.uri().path());
        let response =
            if refused { Either::Left(ready(Ok(over_capacity()))) } else { Either::Right(app.call(request)) };
        async { response.await.map(|response: Response| response.map(|body| open.respond(body))) }
    });
    let mut serving = pin!(http.serve_connection(io, service));
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
