//! From the events of each step to the streams of their requests, on a thread of its own.

use super::stream::Stamped;
use super::{EventBatch, RequestId, TokenEvent};
use std::collections::HashMap;
use std::sync::mpsc::Receiver;
use std::time::Instant;
use tokio::sync::mpsc as events;

/// What the engine thread tells the demultiplexer.
pub(super) enum Demux {
    Open(RequestId, events::Sender<Stamped>),
    /// What happened at this time.
    Events(Instant, EventBatch),
    Close(RequestId),
}

/// Whether it ends its request.
pub(super) fn is_last(event: &TokenEvent) -> bool {
    matches!(event, TokenEvent::Finished { .. } | TokenEvent::Failed { .. } | TokenEvent::GrammarFailed { .. })
}

/// Routes each step's events to the streams of their requests. Never waits: a stream has capacity for all its events.
pub(super) fn demultiplex(batches: &Receiver<Demux>) {
    let mut streams = HashMap::new();
    while let Ok(message) = batches.recv() {
        match message {
            Demux::Open(id, sender) => {
                streams.insert(id, sender);
            }
            Demux::Close(id) => {
                streams.remove(&id);
            }
            Demux::Events(at, batch) => {
                for (id, event) in batch {
                    let last = is_last(&event);
                    if let Some(sender) = streams.get(&id) {
                        // An error means that the client is gone; the engine sees its flag before the next step.
                        let _: Result<(), events::error::TrySendError<Stamped>> = sender.try_send((at, event));
                    }
                    if last {
                        streams.remove(&id);
                    }
                }
            }
        }
    }
}
