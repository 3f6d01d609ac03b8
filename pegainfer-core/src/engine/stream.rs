//! The receiving end of one request.

use super::events::{Backlog, Cancellation, EventSender, Stamped, channel, size};
use super::resubmission::{Next, Resubmission};
use super::{RequestId, TokenEvent};
use crate::sync::events;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

/// Events of one request, in order. Dropping it cancels the request.
///
/// The channel has capacity for every event the request can cause, so the engine never waits for a slow client.
#[derive(Debug)]
pub struct TokenStream {
    id: RequestId,
    engine: usize,
    events: events::Receiver<Stamped>,
    backlog: Arc<Backlog>,
    cancellation: Arc<Cancellation>,
    at: Instant,
    /// For moving to another engine; `None` if there is none, or after the first token.
    resubmission: Option<Box<Resubmission>>,
}

impl TokenStream {
    /// A stream for a request of up to `max_tokens` tokens submitted at `at`, the sender of its events, and its
    /// cancellation.
    pub(super) fn new(id: RequestId, max_tokens: usize, at: Instant) -> (Self, EventSender, Arc<Cancellation>) {
        let (cancellation, backlog) = (Arc::new(Cancellation::default()), Arc::new(Backlog::default()));
        let (sender, events) = channel(max_tokens, backlog.clone());
        let stream =
            Self { id, engine: 0, events, backlog, cancellation: cancellation.clone(), at, resubmission: None };
        (stream, sender, cancellation)
    }

    /// Sets the request's id and engine once they are known.
    pub(super) fn set_id(&mut self, id: RequestId, engine: usize) {
        (self.id, self.engine) = (id, engine);
    }

    /// Lets the request move to another engine.
    pub(super) fn set_resubmission(&mut self, resubmission: Option<Box<Resubmission>>) {
        self.resubmission = resubmission;
    }

    /// Events that [`recv`](Self::recv) has not returned; dropped with the stream.
    pub fn backlog(&self) -> Arc<Backlog> {
        self.backlog.clone()
    }

    /// Id of this request. It changes if the request moves to another engine.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Number of the engine that has the request. It changes with the id.
    pub fn engine(&self) -> usize {
        self.engine
    }

    /// Cancels the request at `deadline`, even if nobody receives any more. Only the first call counts.
    pub fn cancel_at(&self, deadline: Instant) {
        self.cancellation.cancel_at(deadline);
    }

    /// Time when the engine emitted the last received event; before the first one, time of the submit.
    pub fn at(&self) -> Instant {
        self.at
    }

    /// The next event; `None` after the last one, or early if the engine stopped or the deadline passed.
    pub async fn recv(&mut self) -> Option<TokenEvent> {
        loop {
            let stamped = self.events.recv().await;
            if let ControlFlow::Break(event) = self.take(stamped) {
                return event;
            }
        }
    }

    /// Blocking variant of [`recv`](Self::recv), for threads without an async runtime.
    pub fn blocking_recv(&mut self) -> Option<TokenEvent> {
        loop {
            let stamped = self.events.blocking_recv();
            if let ControlFlow::Break(event) = self.take(stamped) {
                return event;
            }
        }
    }

    /// The event to return; continues if there is none, because the request was admitted again or has moved.
    fn take(&mut self, stamped: Option<Stamped>) -> ControlFlow<Option<TokenEvent>> {
        let event = self.stamp(stamped);
        let Some(resubmission) = &mut self.resubmission else { return ControlFlow::Break(event) };
        match resubmission.next(self.id, event.as_ref()) {
            Next::Return => ControlFlow::Break(event),
            Next::Skip => ControlFlow::Continue(()),
            Next::Move if self.move_on().is_some() => ControlFlow::Continue(()),
            Next::Move | Next::ReturnLast => {
                self.resubmission = None;
                ControlFlow::Break(event)
            }
        }
    }

    /// Submits the request again to another engine, whose events follow. `None` if it is refused.
    fn move_on(&mut self) -> Option<()> {
        let resubmission = self.resubmission.as_mut()?;
        let (sender, receiver) = channel(resubmission.max_tokens(), self.backlog.clone());
        (self.id, self.engine) = resubmission.resubmit(sender, self.cancellation.clone())?;
        self.events = receiver;
        Some(())
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
        self.cancellation.cancel();
        self.backlog.drop_all();
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
