//! State that the registry, the socket and the bodies of one connection share.

use super::stall::ReadLimits;
use crate::output::{Outbox, OutputBudget};
use crate::tenant::Networks;
use axum::http::Version;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use tokio::sync::Notify;

/// Value of `waiting_since` while a request is being served.
pub(super) const SERVING: u64 = 0;

/// Chunks larger than this count as unread output immediately, not only at the next check.
const LARGE_CHUNK: usize = 64 << 10;

/// A counter that orders the events of all connections.
#[derive(Debug)]
pub(super) struct Clock(AtomicU64);

impl Default for Clock {
    fn default() -> Self {
        Self(AtomicU64::new(SERVING + 1))
    }
}

impl Clock {
    /// A time later than all earlier ones.
    pub fn now(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}

/// Why a connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    /// A new connection needed its place while it waited for its client.
    Evicted,
    /// Memory is short, and its client left too much output unread.
    Unread,
}

/// One connection, or one stream of a connection with HTTP/2.
#[derive(Debug)]
pub(super) struct Slot {
    /// The connection of a stream; `None` for connections.
    connection: Option<Arc<Slot>>,
    /// Number of open streams of a connection with HTTP/2.
    streams: Mutex<usize>,
    /// Since when output of a stream waits, and what the client had read by then.
    waits: Mutex<Option<(Instant, u64)>>,
    /// Networks of the client; `None` if its connections are not limited.
    pub networks: Option<Networks>,
    /// True if the connection is beyond the server's or its client's limit.
    pub is_extra: bool,
    clock: Arc<Clock>,
    /// When the connection began to wait for its client, or [`SERVING`].
    waiting_since: AtomicU64,
    /// True while a request has begun and its body is incomplete.
    receiving: AtomicBool,
    /// True while the request waits for more of its body.
    waits_for_body: AtomicBool,
    closed: Notify,
    outbox: Arc<Outbox>,
    output: Arc<OutputBudget>,
    /// True if the connection was closed because its client left too much unread.
    unread: AtomicBool,
    /// True if the client speaks HTTP/1.1 and may be sent interim responses.
    accepts_interim: AtomicBool,
    /// Bytes that the socket had written when the request began.
    written_before: AtomicU64,
}

impl Slot {
    /// A connection that has waited for its first request since `began` on the clock, or a stream of `connection`.
    pub fn new(
        (began, clock): (u64, Arc<Clock>),
        connection: Option<Arc<Slot>>,
        networks: Option<Networks>,
        is_extra: bool,
        output: Arc<OutputBudget>,
    ) -> Self {
        Self {
            connection,
            streams: Mutex::new(0),
            waits: Mutex::new(None),
            networks,
            is_extra,
            clock,
            waiting_since: AtomicU64::new(began),
            receiving: AtomicBool::new(false),
            waits_for_body: AtomicBool::new(false),
            closed: Notify::new(),
            outbox: Arc::default(),
            output,
            unread: AtomicBool::new(false),
            accepts_interim: AtomicBool::new(false),
            written_before: AtomicU64::new(0),
        }
    }

    /// Begins a request of this HTTP version.
    pub fn begin(&self, version: Version) {
        self.written_before.store(self.outbox.written(), Ordering::Relaxed);
        self.accepts_interim.store(version >= Version::HTTP_11, Ordering::Relaxed);
        self.receiving.store(true, Ordering::Relaxed);
    }

    /// Marks the request as complete: it is being served from now on.
    pub fn serve(&self) {
        self.waiting_since.store(SERVING, Ordering::Relaxed);
        self.receiving.store(false, Ordering::Relaxed);
    }

    /// True if a request has begun and its body is incomplete or unread.
    pub fn is_receiving(&self) -> bool {
        self.receiving.load(Ordering::Relaxed)
    }

    /// Sets whether the request waits for more of its body.
    pub fn wait_for_body(&self, waits: bool) {
        self.waits_for_body.store(waits, Ordering::Relaxed);
    }

    /// True if the request waits for more of its body.
    pub fn waits_for_body(&self) -> bool {
        self.waits_for_body.load(Ordering::Relaxed)
    }

    /// True if a request is being served.
    pub fn is_serving(&self) -> bool {
        self.waiting_since() == SERVING
    }

    /// When the connection began to wait for its client, or [`SERVING`].
    pub fn waiting_since(&self) -> u64 {
        self.waiting_since.load(Ordering::Relaxed)
    }

    /// Counts a chunk of the response that the connection was given.
    pub fn add_chunk(&self, bytes: usize) {
        self.outbox.add_chunk(bytes);
        if bytes > LARGE_CHUNK {
            self.output.add_chunk(self.outbox.tenant(), bytes);
        }
    }

    /// Marks the response as complete: the connection waits for its client from now on.
    pub fn wait(&self) {
        self.outbox.end();
        self.receiving.store(false, Ordering::Relaxed);
        self.waiting_since.store(self.clock.now(), Ordering::Relaxed);
    }

    /// True if an interim response may be sent to the client.
    pub fn accepts_interim(&self) -> bool {
        self.accepts_interim.load(Ordering::Relaxed)
    }

    /// True if no byte of the response was or is about to be sent.
    pub fn is_silent(&self) -> bool {
        self.outbox.written() == self.written_before.load(Ordering::Relaxed) && self.outbox.unread().bytes == 0
    }

    /// Output that the client has not read yet.
    pub fn outbox(&self) -> &Arc<Outbox> {
        &self.outbox
    }

    /// True for a stream of a connection with HTTP/2.
    pub fn is_stream(&self) -> bool {
        self.connection.is_some()
    }

    /// Counts a new stream of this connection, which is being served from now on.
    pub fn begin_stream(&self) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        *streams += 1;
        self.waiting_since.store(SERVING, Ordering::Relaxed);
    }

    /// Ends this stream. Without streams, its connection waits for its client.
    pub fn end_stream(&self) {
        let Some(connection) = &self.connection else { return };
        let mut streams = connection.streams.lock().unwrap_or_else(PoisonError::into_inner);
        *streams = streams.saturating_sub(1);
        if *streams == 0 {
            connection.waiting_since.store(connection.clock.now(), Ordering::Relaxed);
        }
    }

    /// True for a stream whose client reads waiting output too slowly. Call it regularly.
    pub fn reads_slowly(&self, limits: ReadLimits) -> bool {
        if !self.is_stream() {
            return false;
        }
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        if self.outbox.unread().bytes == 0 {
            *waits = None;
            return false;
        }
        let (now, read) = (Instant::now(), self.outbox.written());
        let (since, before) = *waits.get_or_insert((now, read));
        let elapsed = now - since;
        if elapsed < limits.window {
            return false;
        }
        *waits = Some((now, read));
        ((read - before) as f64) < (limits.min_rate as f64 * elapsed.as_secs_f64()).max(1.0)
    }

    /// Ends the connection. A stream ends with its connection if the client leaves output unread: a stream whose window
    /// is closed cannot be ended alone.
    pub fn close(&self, why: Closed) {
        if let (Some(connection), Closed::Unread) = (&self.connection, why) {
            connection.close(why);
        }
        self.unread.store(why == Closed::Unread, Ordering::Relaxed);
        self.closed.notify_one();
    }

    /// Resolves when the connection has to end.
    pub async fn closed(&self) -> Closed {
        self.closed.notified().await;
        if self.unread.load(Ordering::Relaxed) { Closed::Unread } else { Closed::Evicted }
    }
}
