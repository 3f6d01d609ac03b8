//! The receiving end of one request.

use super::{RequestId, TokenEvent};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc;

/// Events of one request, in order. Dropping it cancels the request.
///
/// The channel has room for every event the request can cause, so the engine never waits for a slow client.
#[derive(Debug)]
pub struct TokenStream {
    id: RequestId,
    events: mpsc::Receiver<TokenEvent>,
    cancelled: Arc<AtomicBool>,
}

impl TokenStream {
    /// A stream for a request of at most `max_tokens` tokens, the sender of its events, and its cancellation flag.
    pub(super) fn new(id: RequestId, max_tokens: usize) -> (Self, mpsc::Sender<TokenEvent>, Arc<AtomicBool>) {
        // Admitted, the tokens, Finished or Failed.
        let (sender, events) = mpsc::channel(max_tokens + 2);
        let cancelled = Arc::new(AtomicBool::new(false));
        (Self { id, events, cancelled: cancelled.clone() }, sender, cancelled)
    }

    /// The engine's name for this request.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The next event; `None` after the last one, or early if the engine stopped.
    pub async fn recv(&mut self) -> Option<TokenEvent> {
        self.events.recv().await
    }

    /// As [`recv`](Self::recv), for threads without an async runtime.
    pub fn blocking_recv(&mut self) -> Option<TokenEvent> {
        self.events.blocking_recv()
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        // A flag instead of a message: it can neither block nor get lost in a full queue.
        self.cancelled.store(true, Ordering::Release);
    }
}
