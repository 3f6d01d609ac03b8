//! Accepts connections, serves them, and drains them at the end.

use super::stall::StallGuard;
use super::{Phase, wrap};
use crate::openai::{self, AppState};
use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Time in which cancelled requests may still send their error to the client.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Serves until `stop` is ready, then lets open requests finish for at most the drain timeout. During the drain, `/health`
/// and every new request get 503, so that load balancers stop sending requests here.
pub async fn serve(mut listener: TcpListener, state: Arc<AppState>, stop: impl Future<Output = ()>) {
    let app = wrap(openai::router(state.clone()), &state);
    let mut stop = pin!(stop);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            (stream, _) = Listener::accept(&mut listener) => {
                connections.spawn(connection(stream, app.clone(), state.clone()));
            }
            Some(_) = connections.join_next() => {}
            () = &mut stop => break,
        }
    }
    state.lifecycle.advance(Phase::Draining);
    let limit = state.options.drain_timeout;
    log::info!("stopping: {} open requests have {} s to finish", open_requests(&state), limit.as_secs_f64());
    // Connections accepted while draining: the drain does not wait for them.
    let mut late = JoinSet::new();
    let mut limit = pin!(tokio::time::sleep(limit));
    loop {
        tokio::select! {
            (stream, _) = Listener::accept(&mut listener) => {
                late.spawn(connection(stream, app.clone(), state.clone()));
            }
            Some(_) = late.join_next() => {}
            ended = connections.join_next() => if ended.is_none() { return },
            () = &mut limit => break,
        }
    }
    log::warn!("{} requests were still open and are cancelled", open_requests(&state));
    state.lifecycle.advance(Phase::Closing);
    // Connections that remain after this belong to clients that do not read.
    let _ = timeout(LAST_WORDS, async { while connections.join_next().await.is_some() {} }).await;
}

fn open_requests(state: &AppState) -> usize {
    let stats = state.engine.stats();
    stats.running + stats.waiting
}

async fn connection(stream: TcpStream, app: Router, state: Arc<AppState>) {
    // Tokens are small writes: with Nagle's algorithm each would wait for the acknowledgement of the previous one.
    if let Err(error) = stream.set_nodelay(true) {
        log::debug!("TCP_NODELAY cannot be set: {error}");
    }
    let Some(tls) = state.options.tls.clone() else { return serve_connection(stream, app, state).await };
    match timeout(state.options.client_timeout, tls.acceptor().accept(stream)).await {
        Ok(Ok(stream)) => serve_connection(stream, app, state).await,
        Ok(Err(error)) => log::debug!("a TLS handshake failed: {error}"),
        Err(_) => log::debug!("a client did not complete the TLS handshake in time"),
    }
}

/// Serves the requests of one connection.
async fn serve_connection(stream: impl AsyncRead + AsyncWrite + Unpin + Send, app: Router, state: Arc<AppState>) {
    let client_timeout = state.options.client_timeout;
    let late = state.lifecycle.phase() != Phase::Serving;
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(client_timeout).keep_alive(!late);
    let io = TokioIo::new(StallGuard::new(stream, client_timeout));
    let mut serving = pin!(http.serve_connection(io, TowerToHyperService::new(app)));
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = state.lifecycle.reached(Phase::Draining), if !late => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        log::debug!("a connection broke: {error}");
    }
}
