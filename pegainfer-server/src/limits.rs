//! Limits of the operator on what requests may take. docs/operations/limits.md lists them all.

use crate::budget;

/// Limits on requests and connections. Each has a flag of its name.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Memory of all requests that the engine does not have yet, in bytes.
    pub max_inflight_bytes: u64,
    /// Bytes per second at which a request body has to come.
    pub min_body_rate: u64,
    /// Minimum rate, in bytes per second, at which a client reads output that waits for it.
    pub min_read_rate: u64,
    /// Size of the largest response that a request may ask for, in bytes, as far as it is known before.
    pub max_response_bytes: u64,
    /// Connections that may be open at the same time.
    pub max_connections: usize,
    /// Requests of one tenant that may run or wait, each choice counted.
    pub max_requests_per_key: usize,
    /// Whether clients may choose the priority of their requests.
    pub allow_priority: bool,
    /// Whether requests with different API keys share cached prefixes.
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
