//! The channel of one request: its events, their size, and its cancellation.

use super::TokenEvent;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::events;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// An event and the time when the engine emitted it.
pub(super) type Stamped = (Instant, TokenEvent);

/// Size in bytes of a stream's undelivered events.
///
/// A gauge: nothing in this crate depends on it, so loom does not model it. The server reads it to end clients that
/// read too slowly.
#[derive(Debug, Default)]
pub struct Backlog {
    bytes: std::sync::atomic::AtomicUsize,
    /// True once the stream and its events are dropped.
    dropped: std::sync::atomic::AtomicBool,
}

impl Backlog {
    /// Bytes now.
    pub fn bytes(&self) -> usize {
        if self.dropped.load(Ordering::Relaxed) { 0 } else { self.bytes.load(Ordering::Relaxed) }
    }

    /// Records that the stream and its events are dropped.
    pub(super) fn drop_all(&self) {
        self.dropped.store(true, Ordering::Relaxed);
    }

    fn add(&self, bytes: usize) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn remove(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Bytes of an event in a stream.
pub(super) fn size(event: &TokenEvent) -> usize {
    size_of::<Stamped>() + event.heap_bytes()
}

/// The sending end of a stream.
pub(super) struct EventSender {
    events: events::Sender<Stamped>,
    backlog: Arc<Backlog>,
}

impl EventSender {
    /// Sends an event; does nothing if the stream is gone.
    pub fn send(&self, at: Instant, event: TokenEvent) {
        let bytes = size(&event);
        // Counted before sending, because the receiver may take it at once.
        self.backlog.add(bytes);
        if self.events.try_send((at, event)).is_err() {
            self.backlog.remove(bytes);
        }
    }
}

/// Written by the owner of a stream, read by the engine thread before each step. A flag instead of a message: it can
/// neither block nor get lost in a full queue.
#[derive(Debug, Default)]
pub(super) struct Cancellation {
    dropped: AtomicBool,
    deadline: OnceLock<Instant>,
}

impl Cancellation {
    /// Cancels the request.
    pub(super) fn cancel(&self) {
        self.dropped.store(true, Ordering::Release);
    }

    /// Cancels the request at `deadline`; only the first call counts.
    pub(super) fn cancel_at(&self, deadline: Instant) {
        self.deadline.get_or_init(|| deadline);
    }

    /// True once the client is gone or the deadline has passed.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.dropped.load(Ordering::Acquire) || self.deadline.get().is_some_and(|&deadline| deadline <= now)
    }
}

/// A channel with capacity for all events of a request of up to `max_tokens` tokens.
pub(super) fn channel(max_tokens: usize, backlog: Arc<Backlog>) -> (EventSender, events::Receiver<Stamped>) {
    // Admitted, Prompt, Vector, the tokens, Finished or Failed.
    let (sender, receiver) = events::channel(max_tokens + 4);
    (EventSender { events: sender, backlog }, receiver)
}
