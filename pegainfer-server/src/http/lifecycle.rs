//! Serving, draining, closing; and what ends a request early.

use crate::openai::ApiError;
use axum::http::StatusCode;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Where the server is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Everyone may come in.
    Serving,
    /// Nobody new comes in; open requests go on.
    Draining,
    /// Open requests are cancelled.
    Closing,
}

/// The server's phase, for everyone who has to know.
#[derive(Debug)]
pub struct Lifecycle(watch::Sender<Phase>);

impl Default for Lifecycle {
    fn default() -> Self {
        Self(watch::Sender::new(Phase::Serving))
    }
}

impl Lifecycle {
    /// The phase now.
    pub fn phase(&self) -> Phase {
        *self.0.borrow()
    }

    /// Goes on to a later phase.
    pub fn advance(&self, phase: Phase) {
        self.0.send_replace(phase);
    }

    /// Ready in this phase and later ones.
    pub fn reached(&self, phase: Phase) -> impl Future<Output = ()> + Send + 'static {
        let mut phases = self.0.subscribe();
        async move {
            // An error means that the server is gone, which is the latest phase of all.
            let _ = phases.wait_for(|now| *now >= phase).await;
        }
    }

    /// Ready when a request with this deadline has to end, complete or not; gives what to tell the client.
    pub fn cutoff(&self, deadline: Option<Deadline>) -> BoxFuture<'static, ApiError> {
        let closing = self.reached(Phase::Closing);
        let passed = async move {
            let Some(deadline) = deadline else { return std::future::pending().await };
            tokio::time::sleep_until(deadline.at.into()).await;
            deadline.error()
        };
        async move {
            tokio::select! {
                () = closing => ApiError::draining(),
                error = passed => error,
            }
        }
        .boxed()
    }
}

/// When a request is cancelled.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    /// The moment.
    pub at: Instant,
    limit: Duration,
}

impl Deadline {
    /// `limit` from now.
    pub fn after(limit: Duration) -> Self {
        Self { at: Instant::now() + limit, limit }
    }

    /// 504, or an event in a stream.
    pub fn error(&self) -> ApiError {
        let message = format!("the request was cancelled: it took longer than {} s", self.limit.as_secs_f64());
        ApiError::new(StatusCode::GATEWAY_TIMEOUT, message).with_code("request_timeout")
    }
}
