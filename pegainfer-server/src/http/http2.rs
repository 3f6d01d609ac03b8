//! Serves the streams of one connection with HTTP/2.
//!
//! Each stream counts as a connection of its own: in `--max-connections`, in the shares of clients, and in the unread
//! output. A chunk of a response counts as unread until HTTP/2 drops it, because the bytes of all streams leave through
//! one socket.

use super::guard::{Peer, is_open};
use super::open_connections::OpenConnection;
use super::preface::{AfterPreface, expect_preface};
use super::server::{MAX_HEAD, Server, over_capacity};
use super::stall::{ReadLimits, StallGuard};
use crate::error::ApiError;
use crate::grpc_status;
use crate::lifecycle::Phase;
use crate::output::Outbox;
use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::response::Response;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http2;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};

/// Maximum number of open streams of a connection.
pub const MAX_STREAMS: u32 = 1024;
/// Bytes of a request's body that a client may send before they are read.
const STREAM_WINDOW: u32 = 64 << 10;
/// The same for all streams of a connection.
const CONNECTION_WINDOW: u32 = 1 << 20;
/// Largest chunk that is given to HTTP/2, so that the progress of a slow client is seen.
const MAX_CHUNK: usize = 16 << 10;
/// Time between two pings of a silent client.
const PING_INTERVAL: Duration = Duration::from_secs(20);

/// Serves the streams of one connection until it ends.
pub(super) async fn serve_connection(
    mut stream: impl AsyncRead + AsyncWrite + Unpin + Send,
    peer: Peer,
    open: &OpenConnection,
    app: Router,
    server: &Server,
) {
    let client_timeout = server.client_timeout;
    if let Err(error) = expect_preface(&mut stream, client_timeout).await {
        return log::debug!("a client on the gRPC port does not speak HTTP/2: {error}");
    }
    let socket = Arc::new(Outbox::shared());
    let limits = ReadLimits { window: client_timeout, min_rate: server.min_read_rate };
    let io = TokioIo::new(StallGuard::new(AfterPreface::new(stream), limits, socket.clone()));
    let mut http = http2::Builder::new(TokioExecutor::new());
    http.timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEAD as u32)
        .max_send_buf_size(MAX_CHUNK)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(client_timeout);
    let service = service_fn(|request| serve_stream(request, peer, open, &socket, &app));
    let mut serving = pin!(http.serve_connection(io, service));
    let late = server.lifecycle.phase() != Phase::Serving;
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

/// Serves one stream.
fn serve_stream(
    request: hyper::Request<Incoming>,
    peer: Peer,
    open: &OpenConnection,
    socket: &Arc<Outbox>,
    app: &Router,
) -> impl Future<Output = Result<Response, Infallible>> + Send + use<> {
    let is_open = is_open(request.uri().path());
    let stream = open.open_stream().filter(|stream| is_open || !stream.is_extra());
    let (socket, app) = (socket.clone(), TowerToHyperService::new(app.clone()));
    async move {
        let Some(stream) = stream.map(Arc::new) else { return Ok(grpc_status::refusal(&over_capacity())) };
        stream.slot().begin(request.version());
        let mut request: Request = request.map(|body| stream.receive(Body::new(body)));
        request.extensions_mut().insert(peer);
        request.extensions_mut().insert(stream.slot().outbox().clone());
        let response: Response = tokio::select! {
            response = app.call(request) => response?,
            _ = stream.closed() => grpc_status::refusal(&ApiError::overloaded(
                "the connections are needed for others while this request is incomplete (--max-connections)",
            )),
        };
        Ok(response.map(|inner| Body::new(StreamBody { inner, rest: Bytes::new(), stream, socket })))
    }
}

/// The body of a response, in chunks that are counted while they wait in the queues of HTTP/2.
struct StreamBody {
    inner: Body,
    /// Bytes of the last frame that were not given to HTTP/2.
    rest: Bytes,
    stream: Arc<OpenConnection>,
    socket: Arc<Outbox>,
}

/// Bytes in the queues of HTTP/2.
struct QueuedChunk {
    bytes: Bytes,
    stream: Arc<OpenConnection>,
    socket: Arc<Outbox>,
}

impl AsRef<[u8]> for QueuedChunk {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for QueuedChunk {
    fn drop(&mut self) {
        self.stream.slot().outbox().wrote(self.bytes.len());
        self.socket.unqueue(self.bytes.len());
    }
}

impl Drop for StreamBody {
    fn drop(&mut self) {
        // No event of the engine waits for the stream any more.
        self.stream.slot().outbox().end();
    }
}

impl StreamBody {
    fn next_chunk(&mut self) -> Frame<Bytes> {
        let bytes = self.rest.split_to(self.rest.len().min(MAX_CHUNK));
        self.socket.add_chunk(bytes.len());
        let (stream, socket) = (self.stream.clone(), self.socket.clone());
        Frame::data(Bytes::from_owner(QueuedChunk { bytes, stream, socket }))
    }
}

impl HttpBody for StreamBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if !self.rest.is_empty() {
            return Poll::Ready(Some(Ok(self.next_chunk())));
        }
        let Some(frame) = ready!(Pin::new(&mut self.inner).poll_frame(cx)) else { return Poll::Ready(None) };
        Poll::Ready(Some(match frame?.into_data() {
            Ok(bytes) if bytes.is_empty() => Ok(Frame::data(bytes)),
            Ok(bytes) => {
                // All of it counts as unread from now on, as on other connections.
                self.stream.slot().add_chunk(bytes.len());
                self.rest = bytes;
                Ok(self.next_chunk())
            }
            Err(trailers) => Ok(trailers),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
