//! Phases of the server (serving, draining, closing), and deadlines of requests.

use crate::error::ApiError;
use axum::http::StatusCode;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Phase of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// New requests are accepted.
    Serving,
    /// New requests are refused; open requests continue.
    Draining,
    /// Open requests are cancelled.
    Closing,
}

/// The current phase, observable by all tasks.
#[derive(Debug, Clone)]
pub struct Lifecycle(watch::Sender<Phase>);

impl Default for Lifecycle {
    fn default() -> Self {
        Self(watch::Sender::new(Phase::Serving))
    }
}

impl Lifecycle {
    /// The current phase.
    pub fn phase(&self) -> Phase {
        *self.0.borrow()
    }

    /// Enters a later phase.
    pub fn advance(&self, phase: Phase) {
        self.0.send_replace(phase);
    }

    /// Resolves in this phase or a later one.
    pub fn reached(&self, phase: Phase) -> impl Future<Output = ()> + Send + 'static {
        let mut phases = self.0.subscribe();
        async move {
            // An error means that the sender was dropped, which counts as the last phase.
            let _ = phases.wait_for(|now| *now >= phase).await;
        }
    }

    /// Resolves with the client's error when a request with this deadline has to be cancelled.
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

/// Deadline of a request.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    /// Time at which the request is cancelled.
    pub at: Instant,
    limit: Duration,
}

impl Deadline {
    /// A deadline `limit` from now.
    pub fn after(limit: Duration) -> Self {
        Self { at: Instant::now() + limit, limit }
    }

    /// The error for the client: a 504, or an event of a stream that has begun.
    pub fn error(&self) -> ApiError {
        let message = format!("the request was cancelled: it took longer than {} s", self.limit.as_secs_f64());
        ApiError::new(StatusCode::GATEWAY_TIMEOUT, message).with_code("request_timeout")
    }
}
