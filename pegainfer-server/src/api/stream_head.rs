//! Who sends the head of a stream, and when: the handler with the first token, or whoever has the timer when it ends.

use axum::http::HeaderValue;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};
use tokio::sync::SetOnce;
use tokio::time::{Sleep, sleep_until};

/// Time after which the head of a stream is sent without a token. Until then a failure is an ordinary error response.
pub const HEAD_DELAY: Duration = Duration::from_millis(400);

/// The timer of a request: a second one for the same purpose would cost as much as the request's JSON.
pub type Timer = Pin<Box<Sleep>>;

/// A timer that ends [`HEAD_DELAY`] after a request arrived.
pub fn head_timer(received: Instant) -> Timer {
    Box::pin(sleep_until((received + HEAD_DELAY).into()))
}

/// A handler's announcement that its response is a stream, an extension of each request.
#[derive(Debug, Clone, Default)]
pub struct StreamHead(Arc<SetOnce<Announced>>);

/// What a handler announced.
#[derive(Debug)]
struct Announced {
    /// Value of `x-ignored-fields`.
    ignored: Option<HeaderValue>,
    /// `None` when the handler has it.
    timer: Mutex<Option<Timer>>,
}

impl StreamHead {
    /// The response will be a stream with this value of `x-ignored-fields`. `received`: when the request had arrived.
    pub fn announce(&self, received: Instant, ignored: Option<&HeaderValue>) {
        let timer = Mutex::new(Some(head_timer(received)));
        // A second announcement would say the same.
        let _ = self.0.set(Announced { ignored: ignored.cloned(), timer });
    }

    /// Waits until the head is due; returns the value of `x-ignored-fields`. Never returns once the handler has taken the timer.
    pub async fn due(&self) -> Option<HeaderValue> {
        let announced = self.0.wait().await;
        poll_fn(|context| match &mut *announced.timer.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(timer) => timer.as_mut().poll(context),
            None => Poll::Pending,
        })
        .await;
        announced.ignored.clone()
    }

    /// The timer, if the handler announced a stream. Whoever takes it sends the head.
    pub fn take_timer(&self) -> Option<Timer> {
        self.0.get()?.timer.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
