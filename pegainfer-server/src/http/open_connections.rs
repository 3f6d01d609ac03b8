//! The open connections: how many there may be, and which one is closed for a new one.
//!
//! A client that only holds connections open must not keep others out. Where there are as many as `--max-connections`
//! allows, the connections that have waited longest for their client are closed: those without a request, and those whose
//! request has not arrived whole. A connection whose request is being served is never closed.

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};
use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use tokio::sync::Notify;

/// Part of the connections that are closed together, so that the search for them costs little per connection.
const CLOSED_TOGETHER: usize = 64;
/// Connections beyond the limit, which are for probes: they get no other answer than 503.
const EXTRA: usize = 16;
/// State of a connection whose request is being served.
const SERVING: u64 = 0;

/// All open connections.
#[derive(Debug)]
pub struct OpenConnections {
    most: usize,
    slots: Mutex<HashMap<u64, Arc<Slot>>>,
    clock: AtomicU64,
}

/// One connection.
#[derive(Debug)]
struct Slot {
    /// When the connection began to wait for its client, on the clock of all connections; or [`SERVING`].
    waiting_since: AtomicU64,
    closed: Notify,
}

/// An open connection. Dropping it makes place for another one.
#[derive(Debug)]
pub struct OpenConnection {
    all: Arc<OpenConnections>,
    id: u64,
    slot: Arc<Slot>,
    extra: bool,
}

impl OpenConnections {
    /// At most `most` connections, and none yet.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most: most.max(1), slots: Mutex::default(), clock: AtomicU64::new(SERVING + 1) })
    }

    /// Enters a new connection, for which others may have to be closed. Where all of them are being served it is an extra one,
    /// or `None` if there are enough of these.
    pub fn open(self: &Arc<Self>) -> Option<OpenConnection> {
        let id = self.now();
        let slot = Arc::new(Slot { waiting_since: AtomicU64::new(id), closed: Notify::new() });
        let mut slots = self.slots();
        if slots.len() >= self.most {
            close_longest_waiting(&mut slots);
        }
        let extra = slots.len() >= self.most;
        if extra && slots.len() >= self.most + EXTRA {
            return None;
        }
        slots.insert(id, slot.clone());
        drop(slots);
        Some(OpenConnection { all: self.clone(), id, slot, extra })
    }

    /// Closes the connections that have waited longest, because the process has no file left.
    pub fn close_some(&self) {
        close_longest_waiting(&mut self.slots());
    }

    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<u64, Arc<Slot>>> {
        // Nothing that can panic runs under the lock.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Closes the connections that have waited longest, at most a [`CLOSED_TOGETHER`]th of all.
fn close_longest_waiting(slots: &mut HashMap<u64, Arc<Slot>>) {
    let waiting = slots.iter().map(|(id, slot)| (slot.waiting_since.load(Ordering::Relaxed), *id));
    let mut waiting: Vec<(u64, u64)> = waiting.filter(|(since, _)| *since != SERVING).collect();
    let count = (slots.len() / CLOSED_TOGETHER).max(1).min(waiting.len());
    if count > 0 {
        waiting.select_nth_unstable(count - 1);
    }
    for (_, id) in &waiting[..count] {
        // The place is free at once; the connection ends in a moment.
        if let Some(slot) = slots.remove(id) {
            slot.closed.notify_one();
        }
    }
}

impl OpenConnection {
    /// Whether it is one more than the limit, because all others are being served.
    pub fn is_extra(&self) -> bool {
        self.extra
    }

    /// Resolves when this connection has to be closed for another one.
    pub async fn closed(&self) {
        self.slot.closed.notified().await;
    }

    /// Follows a request: while its body arrives the connection waits for its client, afterwards it is being served.
    pub fn receive(&self, body: Body) -> Body {
        if body.is_end_stream() {
            self.slot.waiting_since.store(SERVING, Ordering::Relaxed);
            return body;
        }
        Body::new(RequestBody { body, slot: self.slot.clone() })
    }

    /// Follows a response: when it was sent, the connection waits for its client again.
    pub fn respond(&self, body: Body) -> Body {
        let sent = Sent { all: self.all.clone(), slot: self.slot.clone() };
        Body::new(ResponseBody { body, _sent: sent })
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.all.slots().remove(&self.id);
    }
}

type PolledFrame = Poll<Option<Result<Frame<Bytes>, axum::Error>>>;

struct RequestBody {
    body: Body,
    slot: Arc<Slot>,
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> PolledFrame {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if frame.is_none() || self.body.is_end_stream() {
            self.slot.waiting_since.store(SERVING, Ordering::Relaxed);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

struct ResponseBody {
    body: Body,
    _sent: Sent,
}

struct Sent {
    all: Arc<OpenConnections>,
    slot: Arc<Slot>,
}

impl Drop for Sent {
    fn drop(&mut self) {
        self.slot.waiting_since.store(self.all.now(), Ordering::Relaxed);
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> PolledFrame {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[tokio::test]
    async fn the_connection_that_waits_longest_makes_place() {
        let all = OpenConnections::new(3);
        let [served, idle, receiving] = [0; 3].map(|_| all.open().unwrap());
        drop(served.receive(Body::empty()));
        let _body = receiving.receive(Body::from("half"));
        let is_closed = |connection: &OpenConnection| connection.closed().now_or_never().is_some();
        let new = all.open().unwrap();
        assert_eq!([&served, &idle, &receiving].map(is_closed), [false, true, false]);
        let newer = all.open().unwrap();
        assert_eq!([&served, &receiving, &new].map(is_closed), [false, true, false]);
        drop((new.receive(Body::empty()), newer.receive(Body::empty())));
        assert!(all.open().unwrap().is_extra(), "all are being served");
        drop(served.respond(Body::from("done")));
        assert!(!all.open().unwrap().is_extra() && is_closed(&served));
    }

    #[test]
    fn closed_connections_make_place() {
        let all = OpenConnections::new(2);
        for _ in 0..9 {
            let [a, b] = [0; 2].map(|_| all.open().unwrap());
            drop([&a, &b].map(|connection| connection.receive(Body::empty())));
            assert!(!a.is_extra() && !b.is_extra());
            let extra: Vec<_> = std::iter::from_fn(|| all.open()).take(99).collect();
            extra.iter().for_each(|connection| drop(connection.receive(Body::empty())));
            assert!(extra.iter().all(OpenConnection::is_extra));
        }
    }
}
