//! From the events of each step to the streams of their requests, on a thread of its own.

use super::stream::EventSender;
use super::{EventBatch, RequestId, TokenEvent};
use crate::sync::queue::Receiver;
use std::collections::HashMap;
use std::time::Instant;

/// What the engine thread tells the demultiplexer.
pub(super) enum Demux {
    Open(RequestId, EventSender),
    /// What happened at this time.
    Events(Instant, EventBatch),
    Close(RequestId),
}

/// Whether it ends its request.
pub(super) fn is_last(event: &TokenEvent) -> bool {
    matches!(event, TokenEvent::Finished { .. } | TokenEvent::Failed { .. } | TokenEvent::GrammarFailed { .. })
}

/// Routes each step's events to the streams of their requests. Never waits for a client: a stream has capacity for all its
/// events.
pub(super) struct Demultiplexer {
    messages: Receiver<Demux>,
    streams: HashMap<RequestId, EventSender>,
}

impl Demultiplexer {
    /// One without streams, which is told by `messages`.
    pub(super) fn new(messages: Receiver<Demux>) -> Self {
        Self { messages, streams: HashMap::new() }
    }

    /// Routes until the engine thread is gone; every open stream is then closed.
    pub(super) fn run(mut self) {
        while let Ok(message) = self.messages.recv() {
            self.route(message);
        }
    }

    /// Routes the next message; false if there is none now.
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
                        // If the client is gone, the engine sees its flag before the next step.
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
