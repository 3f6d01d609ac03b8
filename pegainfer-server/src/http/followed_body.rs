//! Bodies that report their progress to the connection.

use super::slot::Slot;
use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

type PolledFrame = Poll<Option<Result<Frame<Bytes>, axum::Error>>>;

/// The body of a request. Its end marks the request as being served.
pub(super) struct RequestBody {
    pub body: Body,
    pub slot: Arc<Slot>,
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> PolledFrame {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        self.slot.wait_for_body(polled.is_pending());
        let frame = ready!(polled);
        if frame.is_none() || self.body.is_end_stream() {
            self.slot.serve();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of a response. Bytes that go to the connection count as unread output. At the end of the body, the
/// connection waits for its client.
pub(super) struct ResponseBody {
    pub body: Body,
    pub sent: Sent,
}

/// Ends a response when it is dropped.
pub(super) struct Sent(pub Arc<Slot>);

impl Drop for Sent {
    fn drop(&mut self) {
        self.0.wait();
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> PolledFrame {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(bytes) = frame.data_ref()
        {
            self.sent.0.add_chunk(bytes.len());
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
