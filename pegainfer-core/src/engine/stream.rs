//! The receiving end of one request.

use super::{RequestId, TokenEvent};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::events;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// An event and the time when the engine emitted it.
type Stamped = (Instant, TokenEvent);

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

    fn add(&self, bytes: usize) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn remove(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Bytes of an event in a stream.
fn size(event: &TokenEvent) -> usize {
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
    /// True once the client is gone or the deadline has passed.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.dropped.load(Ordering::Acquire) || self.deadline.get().is_some_and(|&deadline| deadline <= now)
    }
}

/// Events of one request, in order. Dropping it cancels the request.
///
/// The channel has capacity for every event the request can cause, so the engine never waits for a slow client.
#[derive(Debug)]
pub struct TokenStream {
    id: RequestId,
    events: events::Receiver<Stamped>,
    backlog: Arc<Backlog>,
    cancellation: Arc<Cancellation>,
    at: Instant,
}

impl TokenStream {
    /// A stream for a request of up to `max_tokens` tokens submitted at `at`, the sender of its events, and its
    /// cancellation.
    pub(super) fn new(id: RequestId, max_tokens: usize, at: Instant) -> (Self, EventSender, Arc<Cancellation>) {
        // Admitted, Prompt, the tokens, Finished or Failed.
        let (sender, events) = events::channel(max_tokens + 3);
        let (cancellation, backlog) = (Arc::new(Cancellation::default()), Arc::new(Backlog::default()));
        let sender = EventSender { events: sender, backlog: backlog.clone() };
        (Self { id, events, backlog, cancellation: cancellation.clone(), at }, sender, cancellation)
    }

    /// Events that [`recv`](Self::recv) has not returned; dropped with the stream.
    pub fn backlog(&self) -> Arc<Backlog> {
        self.backlog.clone()
    }

    /// The engine's id of this request.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Cancels the request at `deadline`, even if nobody receives any more. Only the first call counts.
    pub fn cancel_at(&self, deadline: Instant) {
        self.cancellation.deadline.get_or_init(|| deadline);
    }

    /// Time when the engine emitted the last received event; before the first one, time of the submit.
    pub fn at(&self) -> Instant {
        self.at
    }

    /// The next event; `None` after the last one, or early if the engine stopped or the deadline passed.
    pub async fn recv(&mut self) -> Option<TokenEvent> {
        let stamped = self.events.recv().await;
        self.stamp(stamped)
    }

    /// Blocking variant of [`recv`](Self::recv), for threads without an async runtime.
    pub fn blocking_recv(&mut self) -> Option<TokenEvent> {
        let stamped = self.events.blocking_recv();
        self.stamp(stamped)
    }

    fn stamp(&mut self, stamped: Option<Stamped>) -> Option<TokenEvent> {
        let (at, event) = stamped?;
        self.backlog.remove(size(&event));
        self.at = at;
        Some(event)
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        self.cancellation.dropped.store(true, Ordering::Release);
        self.backlog.dropped.store(true, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::engine::{TokenLogprobs, TokenOut};

    #[test]
    fn a_stream_counts_what_waits_in_it() {
        let (mut stream, sender, _) = TokenStream::new(RequestId(1), 2, Instant::now());
        let backlog = stream.backlog();
        let token = |top: usize| {
            let logprobs = TokenLogprobs { logprob: -1.0, rank: 1, top: vec![(0, -1.0); top] };
            let logprobs = (top > 0).then(|| Box::new(logprobs));
            TokenEvent::Token(TokenOut { id: 1, is_stop: false, drafted: false, logprobs })
        };
        sender.send(stream.at(), token(0));
        let plain = backlog.bytes();
        assert!((32..128).contains(&plain), "{plain} bytes");
        sender.send(stream.at(), token(20));
        assert!(backlog.bytes() >= 2 * plain + 20 * 8, "{} bytes", backlog.bytes());
        stream.blocking_recv().unwrap();
        assert!(backlog.bytes() >= plain + 20 * 8);
        stream.blocking_recv().unwrap();
        assert_eq!(backlog.bytes(), 0);
        sender.send(stream.at(), token(0));
        drop(stream);
        sender.send(Instant::now(), token(0));
        assert_eq!(backlog.bytes(), 0, "what waited is gone, and the rest could not be sent");
    }
}
