//! Sending the head of a stream: the handler sends it with the first token, or the owner of the timer when it ends.

use axum::http::HeaderValue;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};
use tokio::sync::SetOnce;
use tokio::time::{Sleep, sleep_until};

/// The head of a stream is sent after this time even without a token. Before that, a failure is an ordinary error
/// response.
pub const HEAD_DELAY: Duration = Duration::from_millis(400);

/// The timer of a request. It is reused, because a second one would cost as much as the request's JSON.
pub type Timer = Pin<Box<Sleep>>;

/// A timer that ends [`HEAD_DELAY`] after the request arrived.
pub fn head_timer(received: Instant) -> Timer {
    Box::pin(sleep_until((received + HEAD_DELAY).into()))
}

/// A handler's announcement that its response is a stream, an extension of each request.
#[derive(Debug, Clone, Default)]
pub struct StreamHead(Arc<Head>);

#[derive(Debug, Default)]
struct Head {
    announced: SetOnce<Announced>,
    /// What the request waits for, in words.
    wait: Mutex<Option<(String, Instant)>>,
}

/// A handler's announcement.
#[derive(Debug)]
struct Announced {
    /// Value of `x-ignored-fields`.
    ignored: Option<HeaderValue>,
    /// `None` after the handler took it.
    timer: Mutex<Option<Timer>>,
}

impl StreamHead {
    /// Announces a stream with this value of `x-ignored-fields`. `received` is when the request had arrived.
    pub fn announce(&self, received: Instant, ignored: Option<&HeaderValue>) {
        let timer = Mutex::new(Some(head_timer(received)));
        // A second announcement would be the same.
        let _ = self.0.announced.set(Announced { ignored: ignored.cloned(), timer });
    }

    /// Says what the request waits for.
    pub fn announce_wait(&self, what: String) {
        *self.0.wait.lock().unwrap_or_else(PoisonError::into_inner) = Some((what, Instant::now()));
    }

    /// What the request waits for, and for how many seconds it has waited.
    pub fn wait(&self) -> Option<(String, u64)> {
        let wait = self.0.wait.lock().unwrap_or_else(PoisonError::into_inner);
        wait.as_ref().map(|(what, since)| (what.clone(), since.elapsed().as_secs()))
    }

    /// Waits until the head is due, and returns the value of `x-ignored-fields`. Never returns after the handler took
    /// the timer.
    pub async fn due(&self) -> Option<HeaderValue> {
        let announced = self.0.announced.wait().await;
        poll_fn(|context| match &mut *announced.timer.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(timer) => timer.as_mut().poll(context),
            None => Poll::Pending,
        })
        .await;
        announced.ignored.clone()
    }

    /// The timer, if the handler announced a stream. Its owner sends the head.
    pub fn take_timer(&self) -> Option<Timer> {
        self.0.announced.get()?.timer.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
