//! What all connections share: options, and the refusal of those beyond the limit.

use super::forwarded::TrustedProxies;
use super::tls::Tls;
use crate::error::ApiError;
use crate::lifecycle::Lifecycle;
use crate::metrics::Metrics;
use crate::output::OutputBudget;
use std::sync::Arc;
use std::time::Duration;

/// Maximum size of a request's head, and of one read of a body.
pub(super) const MAX_HEAD: usize = 64 << 10;

/// Options of the connections.
pub struct Server {
    /// Maximum time for which a client may read no byte of a response, or not complete the head of its next request.
    pub client_timeout: Duration,
    /// Minimum rate in bytes per second at which a client has to read waiting output, averaged over the client timeout.
    pub min_read_rate: u64,
    /// Budget of output that clients have not read yet.
    pub output: Arc<OutputBudget>,
    /// Counts connections that are closed because of unread output.
    pub metrics: Arc<Metrics>,
    /// Trusted proxies; one connection of a proxy serves many clients.
    pub proxies: TrustedProxies,
    /// Time that open requests have to finish after the signal to stop.
    pub drain_timeout: Duration,
    /// Certificate and key; `None` serves plain HTTP.
    pub tls: Option<Tls>,
    /// Maximum number of open connections.
    pub max_connections: usize,
    /// Announces when the server drains and closes.
    pub lifecycle: Lifecycle,
    /// Number of requests that are running or waiting, for the log.
    pub open_requests: Box<dyn Fn() -> usize + Send + Sync>,
}

/// The refusal of a request on a connection beyond the limit.
pub(super) fn over_capacity() -> ApiError {
    let message = "every connection that may be open, or that your address may have, is being served \
        (--max-connections); try again later";
    ApiError::overloaded(message)
}
