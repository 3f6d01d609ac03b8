//! Limits on requests, set by the operator. docs/operations/limits.md lists them all.

use crate::budget;

/// Limits on requests and connections. Each has a flag of the same name.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Maximum memory, in bytes, of all requests that have not reached the engine.
    pub max_inflight_bytes: u64,
    /// Minimum rate of a request body, in bytes per second.
    pub min_body_rate: u64,
    /// Minimum rate, in bytes per second, at which a client reads waiting output.
    pub min_read_rate: u64,
    /// Maximum size, in bytes, of the response that a request may ask for, as far as it is known in advance.
    pub max_response_bytes: u64,
    /// Maximum number of open connections.
    pub max_connections: usize,
    /// Maximum number of running and waiting requests of one tenant; each choice counts.
    pub max_requests_per_key: usize,
    /// True if clients may choose the priority of their requests.
    pub allow_priority: bool,
    /// True if requests with different API keys share cached prefixes.
    pub share_prefix_cache: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_inflight_bytes: budget::DEFAULT_BYTES,
            min_body_rate: 1 << 10,
            min_read_rate: 1 << 10,
            max_response_bytes: 64 << 20,
            max_connections: 8192,
            max_requests_per_key: usize::MAX,
            allow_priority: false,
            share_prefix_cache: false,
        }
    }
}
