//! Half-closed connections. A client that waits for its answer (`nc -N`) and a client that left both close their side.
//!
//! Only sending bytes tells them apart: the socket of a client that left refuses them. While its request is being
//! served, the end of the client's bytes is therefore hidden. Bytes of the response soon show whether the client is
//! there. A stream that is silent is asked for a comment. If the response has not begun, because all of it is still
//! being generated, an interim response (`100 Continue`) is sent, which every HTTP/1.1 client has to accept.

use super::slot::Slot;
use std::io::{ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

/// Time to wait for a response before probing the client.
const PROBE_DELAY: Duration = Duration::from_secs(1);
/// Time in which a request reads the last part of its body after it arrived.
const LAST_PART: Duration = Duration::from_millis(5);
/// Interval between checks whether the client refused the bytes.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Time between two interim responses.
const PROBE_INTERVAL: Duration = Duration::from_secs(15);
const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// A socket that hides the end of the client's bytes while a request is being served, as long as the client is there.
pub struct HalfClose {
    stream: TcpStream,
    slot: Arc<Slot>,
    /// `Some` after the client closed its side.
    ended: Option<Ended>,
}

struct Ended {
    look: Pin<Box<Sleep>>,
    /// Time by which a complete body must have been read.
    unread_until: Instant,
    /// Time of the next probe.
    probe: Instant,
}

impl HalfClose {
    /// Wraps the socket of the connection with this slot.
    pub fn new(stream: TcpStream, slot: Arc<Slot>) -> Self {
        Self { stream, slot, ended: None }
    }

    /// Hides the end of the client's bytes. Fails if the client left.
    fn hide_end(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let Self { stream, slot, ended } = self;
        let ended = ended.get_or_insert_with(|| {
            let now = Instant::now();
            // A request that waits for more of its body was truncated, unless the last part has just arrived.
            let grace = if slot.waits_for_body() { LAST_PART } else { PROBE_DELAY };
            let look = Box::pin(sleep_until(now + grace.min(CHECK_INTERVAL)));
            Ended { look, unread_until: now + grace, probe: now + PROBE_DELAY }
        });
        // A complete body may not have been read yet. A truncated body ends the request, because others wait for its
        // memory.
        while is_answering(slot) || (slot.is_receiving() && Instant::now() < ended.unread_until) {
            if ended.look.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            if let Some(error) = stream.take_error()? {
                return Poll::Ready(Err(error));
            }
            let now = Instant::now();
            ended.look.as_mut().reset(now + CHECK_INTERVAL);
            if now < ended.probe || !is_answering(slot) {
                continue;
            }
            ended.probe = now + PROBE_INTERVAL;
            if !slot.is_silent() {
                // An interim response would interrupt the response.
                slot.outbox().probe();
            } else if slot.accepts_interim() {
                match stream.try_write(INTERIM) {
                    // A client that has not read all of an earlier response is there.
                    Err(error) if error.kind() != ErrorKind::WouldBlock => return Poll::Ready(Err(error)),
                    _ => {}
                }
            } else {
                break;
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// True if the client has not received its whole response.
fn is_answering(slot: &Slot) -> bool {
    slot.is_serving() || slot.outbox().unread().bytes > 0
}

impl AsyncRead for HalfClose {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        if self.ended.is_none() {
            let before = buffer.filled().len();
            let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
            let is_end =
                matches!(read, Poll::Ready(Ok(()))) && buffer.filled().len() == before && buffer.remaining() > 0;
            if !is_end || !(is_answering(&self.slot) || self.slot.is_receiving()) {
                return read;
            }
        }
        self.hide_end(cx)
    }
}

impl AsyncWrite for HalfClose {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
