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
pub struct Lifecycle {
    phase: watch::Sender<Phase>,
    /// True after an admin asked for the end of the server.
    stop: watch::Sender<bool>,
}

impl Default for Lifecycle {
    fn default() -> Self {
        Self { phase: watch::Sender::new(Phase::Serving), stop: watch::Sender::new(false) }
    }
}

impl Lifecycle {
    /// The current phase.
    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Enters a later phase.
    pub fn advance(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }

    /// Asks the server to drain and end.
    pub fn ask_to_stop(&self) {
        self.stop.send_replace(true);
    }

    /// Resolves when the server has to drain and end, because an admin asked for it.
    pub fn asked_to_stop(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut stop = self.stop.subscribe();
        async move {
            if stop.wait_for(|asked| *asked).await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Resolves in this phase or a later one.
    pub fn reached(&self, phase: Phase) -> impl Future<Output = ()> + Send + 'static {
        let mut phases = self.phase.subscribe();
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

    /// The output of a future that ends before the deadline of its request, or else the deadline's error.
    pub async fn bound<T>(deadline: Option<Self>, future: impl Future<Output = T>) -> Result<T, ApiError> {
        match deadline {
            Some(deadline) => tokio::time::timeout_at(deadline.at.into(), future).await.map_err(|_| deadline.error()),
            None => Ok(future.await),
        }
    }

    /// The error for the client: a 504, or an event of a stream that has begun.
    pub fn error(&self) -> ApiError {
        let message = format!("the request was cancelled: it took longer than {} s", self.limit.as_secs_f64());
        ApiError::new(StatusCode::GATEWAY_TIMEOUT, message).with_code("request_timeout")
    }
}
