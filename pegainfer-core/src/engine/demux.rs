//! The demultiplexer thread: hands the events of each step to the streams of their requests.

use super::events::EventSender;
use super::{EventBatch, RequestId, TokenEvent};
use crate::sync::queue::Receiver;
use std::collections::HashMap;
use std::time::Instant;

/// Messages from the engine thread to the demultiplexer.
pub(super) enum Demux {
    Open(RequestId, EventSender),
    /// Events of one step, and the time they happened.
    Events(Instant, EventBatch),
    Close(RequestId),
}

/// True if the event ends its request.
pub(super) fn is_last(event: &TokenEvent) -> bool {
    matches!(event, TokenEvent::Finished { .. } | TokenEvent::Failed { .. } | TokenEvent::GrammarFailed { .. })
}

/// Routes each step's events to the streams of their requests. Never waits for a client, because a stream has capacity
/// for all its events.
pub(super) struct Demultiplexer {
    messages: Receiver<Demux>,
    streams: HashMap<RequestId, EventSender>,
}

impl Demultiplexer {
    /// A demultiplexer that knows no stream yet and reads `messages`.
    pub(super) fn new(messages: Receiver<Demux>) -> Self {
        Self { messages, streams: HashMap::new() }
    }

    /// Routes messages until the engine thread is gone, then closes every open stream.
    pub(super) fn run(mut self) {
        while let Ok(message) = self.messages.recv() {
            self.route(message);
        }
    }

    /// Routes the next message; false if none is queued.
    pub(super) fn turn(&mut self) -> bool {
        self.messages.try_recv().map(|message| self.route(message)).is_ok()
    }

    fn route(&mut self, message: Demux) {
        match message {
            Demux::Open(id, sender) => {
                self.streams.insert(id, sender);
            }
            Demux::Close(id) => {
                self.streams.remove(&id);
            }
            Demux::Events(at, batch) => {
                for (id, event) in batch {
                    let last = is_last(&event);
                    if let Some(sender) = self.streams.get(&id) {
                        // If the client is gone, the engine sees the cancellation flag before the next step.
                        sender.send(at, event);
                    }
                    if last {
                        self.streams.remove(&id);
                    }
                }
            }
        }
    }
}
