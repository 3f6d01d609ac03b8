//! Command-line flags that limit what requests may take.

use crate::budget;
use crate::http;
use crate::limits::Limits;
use clap::Args;
use pegainfer_terminal::values::parse_bytes;
use std::num::NonZeroUsize;

/// Flags that limit what requests may take.
#[derive(Debug, Clone, Args)]
pub struct LimitArgs {
    /// Memory for all requests that are read, parsed and rendered; requests wait for their share. Large responses and
    /// unread output may take as much again
    #[arg(long, value_name = "BYTES", default_value = "256M", value_parser = parse_inflight_bytes)]
    pub max_inflight_bytes: u64,
    /// Refuse request bodies that come at fewer bytes per second
    #[arg(long, value_name = "BYTES", default_value = "1K", value_parser = parse_bytes)]
    pub min_body_rate: u64,
    /// Close a connection if its client reads waiting output more slowly than this, on average over --client-timeout
    #[arg(long, value_name = "BYTES", default_value = "1K", value_parser = parse_bytes)]
    pub min_read_rate: u64,
    /// Refuse requests for larger responses: all choices with their tokens and log-probabilities
    #[arg(long, value_name = "BYTES", default_value = "64M", value_parser = parse_bytes)]
    pub max_response_bytes: u64,
    /// Maximum number of open connections; beyond it, the longest idle ones are closed [default: 8192, fewer where the
    /// limit of open files (ulimit -n) is low]
    #[arg(long, value_name = "N")]
    pub max_connections: Option<NonZeroUsize>,
    /// Maximum number of running and queued requests (each choice counts) of one API key, or of one address without
    /// keys [default: no limit]
    #[arg(long, value_name = "N")]
    pub max_requests_per_key: Option<NonZeroUsize>,
    /// Let requests choose their priority in the queue; without this flag they are refused
    #[arg(long)]
    pub allow_priority: bool,
    /// Share cached prefixes between API keys; one key can then find out what another one has sent
    #[arg(long)]
    pub share_prefix_cache: bool,
}

impl LimitArgs {
    /// The limits, with defaults filled in.
    pub fn limits(&self) -> Limits {
        let default = Limits::default().max_connections.min(http::max_open_connections());
        Limits {
            max_inflight_bytes: self.max_inflight_bytes,
            min_body_rate: self.min_body_rate,
            min_read_rate: self.min_read_rate,
            max_response_bytes: self.max_response_bytes,
            max_connections: self.max_connections.map_or(default, Into::into),
            max_requests_per_key: self.max_requests_per_key.map_or(usize::MAX, Into::into),
            allow_priority: self.allow_priority,
            share_prefix_cache: self.share_prefix_cache,
        }
    }
}

fn parse_inflight_bytes(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text)?;
    if bytes < budget::MIN_BYTES {
        return Err(format!("{text} is less than {} bytes, which no server can work with", budget::MIN_BYTES));
    }
    Ok(bytes)
}
