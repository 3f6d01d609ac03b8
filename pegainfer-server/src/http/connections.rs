//! Serves connections, and drains them at the end.

use super::acceptor::{Acceptor, Protocol};
use super::guard::{Peer, is_open};
use super::half_close::HalfClose;
use super::http2;
use super::open_connections::{OpenConnection, OpenConnections};
use super::server::{MAX_HEAD, Server, over_capacity};
use super::slot::Closed;
use super::stall::{ReadLimits, StallGuard};
use crate::lifecycle::Phase;
use crate::rejection::Rejection;
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_util::future::{Either, ready};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

/// Interval between checks of the unread output of all connections.
const UNREAD_INTERVAL: Duration = Duration::from_millis(100);
const RESOURCE_POLICY: HeaderName = HeaderName::from_static("cross-origin-resource-policy");
/// Time in which cancelled requests may still send their error to the client.
const ERROR_GRACE: Duration = Duration::from_secs(2);

/// The ports, and what is served on each.
pub struct Ports {
    /// HTTP/1.1.
    pub http: (TcpListener, Router),
    /// gRPC over HTTP/2, if it is served.
    pub grpc: Option<(TcpListener, Router)>,
}

/// A new connection.
struct Accepted {
    stream: TcpStream,
    peer: Peer,
    open: OpenConnection,
    protocol: Protocol,
    app: Router,
}

/// Accepts connections on all ports.
struct Acceptors {
    http: (Acceptor, Router),
    grpc: Option<(Acceptor, Router)>,
}

impl Acceptors {
    fn new(ports: Ports, open: &Arc<OpenConnections>, server: &Server) -> Self {
        let accept = |(listener, app)| (Acceptor::new(listener, open.clone(), server.proxies.clone()), app);
        Self { http: accept(ports.http), grpc: ports.grpc.map(accept) }
    }

    async fn accept(&mut self) -> Accepted {
        let (http, grpc) = (&mut self.http, &mut self.grpc);
        let grpc = async {
            match grpc {
                Some((acceptor, app)) => (acceptor.accept().await, app.clone()),
                None => std::future::pending().await,
            }
        };
        let (((stream, peer, open), app), protocol) = tokio::select! {
            accepted = http.0.accept() => ((accepted, http.1.clone()), Protocol::Http1),
            accepted = grpc => (accepted, Protocol::Http2),
        };
        Accepted { stream, peer, open, protocol, app }
    }
}

/// Serves until `stop` is ready, then waits for open requests, at most for the drain timeout. During the drain,
/// `/health` and every new request get 503, so that load balancers stop sending requests here.
pub async fn serve(ports: Ports, server: Server, stop: impl Future<Output = ()>) {
    let open = OpenConnections::new(server.max_connections, server.output.clone());
    let mut acceptors = Acceptors::new(ports, &open, &server);
    let server = Arc::new(server);
    // Ends when the server is dropped.
    let mut background = JoinSet::new();
    background.spawn(close_unread(open, server.clone()));
    let mut stop = pin!(stop);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = acceptors.accept() => {
                connections.spawn(connection(accepted, server.clone()));
            }
            Some(_) = connections.join_next() => {}
            () = &mut stop => break,
        }
    }
    server.lifecycle.advance(Phase::Draining);
    let limit = server.drain_timeout;
    log::info!("stopping: {} open requests have {} s to finish", (server.open_requests)(), limit.as_secs_f64());
    // Connections accepted while draining. The drain does not wait for them.
    let mut late = JoinSet::new();
    let mut limit = pin!(tokio::time::sleep(limit));
    loop {
        tokio::select! {
            accepted = acceptors.accept() => {
                late.spawn(connection(accepted, server.clone()));
            }
            Some(_) = late.join_next() => {}
            ended = connections.join_next() => if ended.is_none() { return },
            () = &mut limit => break,
        }
    }
    log::warn!("{} requests were still open and are cancelled", (server.open_requests)());
    server.lifecycle.advance(Phase::Closing);
    // The clients of the remaining connections do not read.
    let _ = timeout(ERROR_GRACE, async { while connections.join_next().await.is_some() {} }).await;
}

/// Closes connections while unread output exceeds its budget.
async fn close_unread(open: Arc<OpenConnections>, server: Arc<Server>) {
    let limits = ReadLimits { window: server.client_timeout, min_rate: server.min_read_rate };
    let mut looks = interval(UNREAD_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        open.close_slow(limits);
        let closed = open.close_unread();
        server.metrics.unread_output(server.output.unread());
        if closed > 0 {
            log::warn!(
                "{closed} connections were closed: their clients left too much output unread (--max-inflight-bytes)"
            );
            (0..closed).for_each(|_| server.metrics.rejected(Rejection::UnreadOutput));
        }
    }
}

/// Tells browsers not to guess content types, and to show responses to pages of other origins only if CORS allows it.
fn protect(mut response: Response) -> Response {
    for (name, value) in [(header::X_CONTENT_TYPE_OPTIONS, "nosniff"), (RESOURCE_POLICY, "same-origin")] {
        response.headers_mut().entry(name).or_insert(HeaderValue::from_static(value));
    }
    response
}

async fn connection(accepted: Accepted, server: Arc<Server>) {
    let Accepted { stream, peer, open, protocol, app } = accepted;
    let serving = async {
        let Some(tls) = server.tls.clone() else {
            return match protocol {
                Protocol::Http1 => {
                    let stream = HalfClose::new(stream, open.slot().clone());
                    serve_connection(stream, peer, &open, app, &server).await
                }
                Protocol::Http2 => Box::pin(http2::serve_connection(stream, peer, &open, app, &server)).await,
            };
        };
        match timeout(server.client_timeout, tls.acceptor(protocol).accept(stream)).await {
            Ok(Ok(stream)) => match protocol {
                Protocol::Http1 => serve_connection(stream, peer, &open, app, &server).await,
                Protocol::Http2 => Box::pin(http2::serve_connection(stream, peer, &open, app, &server)).await,
            },
            Ok(Err(error)) => log::debug!("a TLS handshake failed: {error}"),
            Err(_) => log::debug!("a client did not complete the TLS handshake in time"),
        }
    };
    tokio::select! {
        () = serving => {}
        why = open.closed() => match why {
            Closed::Evicted => log::debug!("a waiting connection was closed for a new one (--max-connections)"),
            Closed::Unread => log::debug!("a connection was closed: its client left too much output unread"),
        },
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
    let limits = ReadLimits { window: client_timeout, min_rate: server.min_read_rate };
    let io = TokioIo::new(StallGuard::new(stream, limits, open.slot().outbox().clone()));
    let app = TowerToHyperService::new(app);
    let service = service_fn(|request: hyper::Request<hyper::body::Incoming>| {
        open.slot().begin(request.version());
        let mut request: Request = request.map(|body| open.receive(Body::new(body)));
        request.extensions_mut().insert(peer);
        request.extensions_mut().insert(open.slot().outbox().clone());
        let refused = open.is_extra() && !is_open(request.uri().path());
        let response = if refused {
            Either::Left(ready(Ok(over_capacity().into_response())))
        } else {
            Either::Right(app.call(request))
        };
        async { response.await.map(|response: Response| protect(response).map(|body| open.respond(body))) }
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
