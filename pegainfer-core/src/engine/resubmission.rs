//! Submits a request again, to another engine, after its engine is lost.
//!
//! A stream knows its request until the first token. If its engine stops before that, the request goes to another
//! engine and the stream continues with that engine's events; the client notices nothing. A request that has a token
//! ends with an error, because another engine may draw other tokens.
//!
//! A request whose prompt was being computed may be the cause of the failure. It is submitted again only once, so that
//! it stops two engines at most.

use super::events::{Cancellation, EventSender};
use super::{GenerateRequest, RequestId, TokenEvent};
use std::sync::{Arc, Weak};

/// The engines that may run a request.
pub(super) trait Engines: Send + Sync {
    /// True if the engine of this request has stopped.
    fn has_lost(&self, id: RequestId) -> bool;

    /// Queues a request again because its engine has stopped. Its events go to `events`. Returns
    /// its new id and engine; `None` if it is refused.
    fn resubmit(
        &self,
        request: GenerateRequest,
        events: EventSender,
        cancellation: Arc<Cancellation>,
    ) -> Option<(RequestId, usize)>;
}

/// What is needed to submit the request of a stream again.
pub(super) struct Resubmission {
    engines: Weak<dyn Engines>,
    request: GenerateRequest,
    /// True once an engine has admitted the request.
    admitted: bool,
    /// True once the request has moved although it was admitted.
    moved_admitted: bool,
}

/// What a stream does with an event.
pub(super) enum Next {
    /// Returns it.
    Return,
    /// Returns it; this and later events need no resubmission.
    ReturnLast,
    /// Drops it and takes the next one.
    Skip,
    /// Submits the request again.
    Move,
}

impl Resubmission {
    /// For a new request of these engines. A request for a certain engine stays there.
    pub fn new(engines: Weak<dyn Engines>, request: &GenerateRequest) -> Option<Box<Self>> {
        let request = request.engine.is_none().then(|| request.clone())?;
        Some(Box::new(Self { engines, request, admitted: false, moved_admitted: false }))
    }

    /// What to do with the next event of the request with this id; `None` is the early end of its stream.
    pub fn next(&mut self, id: RequestId, event: Option<&TokenEvent>) -> Next {
        match event {
            Some(TokenEvent::Admitted { .. }) if std::mem::replace(&mut self.admitted, true) => Next::Skip,
            Some(TokenEvent::Admitted { .. }) => Next::Return,
            Some(TokenEvent::Failed { .. }) | None if self.may_move(id) => Next::Move,
            _ => Next::ReturnLast,
        }
    }

    fn may_move(&self, id: RequestId) -> bool {
        !self.moved_admitted && self.engines.upgrade().is_some_and(|engines| engines.has_lost(id))
    }

    /// Submits the request again. `None` if it is refused.
    pub fn resubmit(&mut self, events: EventSender, cancellation: Arc<Cancellation>) -> Option<(RequestId, usize)> {
        self.moved_admitted = self.admitted;
        self.engines.upgrade()?.resubmit(self.request.clone(), events, cancellation)
    }

    /// Maximum number of tokens of the request.
    pub fn max_tokens(&self) -> usize {
        self.request.max_tokens
    }
}

impl std::fmt::Debug for Resubmission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resubmission").field("admitted", &self.admitted).finish_non_exhaustive()
    }
}
