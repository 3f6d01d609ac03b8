//! The receiving end of one request.

use super::{RequestId, TokenEvent};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::events;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// An event and when the engine emitted it.
pub(super) type Stamped = (Instant, TokenEvent);

/// Written by the owner of a stream, read by the engine thread before each step. A flag instead of a message: it can
/// neither block nor get lost in a full queue.
#[derive(Debug, Default)]
pub(super) struct Cancellation {
    dropped: AtomicBool,
    deadline: OnceLock<Instant>,
}

impl Cancellation {
    /// True once nobody wants the rest of the request.
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
    cancellation: Arc<Cancellation>,
    at: Instant,
}

impl TokenStream {
    /// A stream for a request of at most `max_tokens` tokens that is submitted at `at`, the sender of its events, and its
    /// cancellation.
    pub(super) fn new(
        id: RequestId,
        max_tokens: usize,
        at: Instant,
    ) -> (Self, events::Sender<Stamped>, Arc<Cancellation>) {
        // Admitted, Prompt, the tokens, Finished or Failed.
        let (sender, events) = events::channel(max_tokens + 3);
        let cancellation = Arc::new(Cancellation::default());
        (Self { id, events, cancellation: cancellation.clone(), at }, sender, cancellation)
    }

    /// The engine's name for this request.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Cancels the request at `deadline`, also when nobody receives any more. Only the first call counts.
    pub fn cancel_at(&self, deadline: Instant) {
        self.cancellation.deadline.get_or_init(|| deadline);
    }

    /// When the engine emitted the event that was received last; before the first one, when the request was submitted.
    pub fn at(&self) -> Instant {
        self.at
    }

    /// The next event; `None` after the last one, or early if the engine stopped or the deadline passed.
    pub async fn recv(&mut self) -> Option<TokenEvent> {
        let stamped = self.events.recv().await;
        self.stamp(stamped)
    }

    /// As [`recv`](Self::recv), for threads without an async runtime.
    pub fn blocking_recv(&mut self) -> Option<TokenEvent> {
        let stamped = self.events.blocking_recv();
        self.stamp(stamped)
    }

    fn stamp(&mut self, stamped: Option<Stamped>) -> Option<TokenEvent> {
        let (at, event) = stamped?;
        self.at = at;
        Some(event)
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        self.cancellation.dropped.store(true, Ordering::Release);
    }
}
