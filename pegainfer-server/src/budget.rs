//! Memory of requests before they reach the engine: bodies while they are read, and their parsed values.
//!
//! One budget, `--max-inflight-bytes`, in three parts, so that no two requests wait for each other:
//!
//! - An eighth for bodies up to [`SMALL_BODY`]: ordinary requests are read even when clients fill the rest with large
//!   ones.
//! - Three eighths for larger bodies. When these parts are used up, one body at a time continues without a share, so
//!   that bodies that are partly read cannot block each other.
//! - Half for parsed bodies, and an eighth of that for small ones. A parsed body holds its share until its prompt is
//!   tokenized. While a request waits for its grammar, only the grammar holds a share.
//!
//! A body takes its share as its bytes arrive; an announced length costs nothing. Tenants take turns in each part, and
//! one tenant leaves a quarter of it to the others. Output has a [budget of its own](crate::output).

mod reading;
#[cfg(test)]
mod tests;

use crate::fair_queue::{MAX_WAIT, Permits, QueueLimits, Slots};
use crate::tenant::Tenant;
pub use reading::BodyBuffer;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use thiserror::Error;

/// Smallest value of `--max-inflight-bytes`.
pub const MIN_BYTES: u64 = 1 << 20;
/// Largest body that takes its share from the part for small ones.
pub const SMALL_BODY: usize = 64 << 10;
/// Bytes per parsed JSON value: a node of the tree, and the unused capacity of its list or object.
const VALUE_BYTES: usize = 128;
/// Bytes of one permit of the semaphores.
const UNIT: usize = 1 << 10;
/// Largest parsed body that takes its share from the part for small ones.
const SMALL_PARSED: usize = 1 << 20;

/// Why a request got no memory.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BudgetError {
    /// Other requests use all of it.
    #[error(
        "the requests that are being read take all of the {limit} bytes that they may take together \
         (--max-inflight-bytes); try again later"
    )]
    Busy {
        /// Bytes of the budget.
        limit: u64,
    },
    /// Other responses use all of it.
    #[error(
        "the large responses that are generated or wait for their clients take all of the {limit} bytes that they may take \
         together (--max-inflight-bytes); try again later, or ask for fewer log-probabilities"
    )]
    Responses {
        /// Bytes of the budget.
        limit: u64,
    },
    /// This request alone needs too much.
    #[error(
        "the request body has {values} JSON values, which take more memory than one request may have: at most {max_values} \
         values (--max-inflight-bytes is {limit})"
    )]
    TooManyValues {
        /// Values of the body.
        values: usize,
        /// Maximum number of values of a body without text.
        max_values: usize,
        /// Bytes of the budget.
        limit: u64,
    },
}

/// The budget of all requests.
#[derive(Debug)]
pub struct Budget {
    limit: u64,
    small: Slots,
    large: Slots,
    /// One permit, for the body that continues without a share.
    exempt: Slots,
    small_parsed: Slots,
    parsed: Slots,
    /// Maximum number of bytes of one parsed body.
    parsed_bytes: usize,
    /// Number of bodies larger than [`SMALL_BODY`] so far.
    large_bodies: AtomicU64,
}

/// Share of a body; given back when it is dropped.
#[derive(Debug, Default)]
pub struct BodyShare(Vec<Permits>);

impl BodyShare {
    /// Gives back all but the share of `bytes` bytes.
    pub fn shrink(&mut self, bytes: usize) {
        let mut kept = units(bytes) as usize;
        for permits in &mut self.0 {
            permits.shrink(kept);
            kept -= permits.count();
        }
    }
}

impl Budget {
    /// A budget of `limit` bytes, at least [`MIN_BYTES`].
    pub fn new(limit: u64) -> Self {
        let limit = limit.max(MIN_BYTES);
        let part = |eighths: u64| (limit / 8 * eighths) as usize;
        Self {
            limit,
            small: slots(part(1)),
            large: slots(part(3)),
            exempt: Slots::new(QueueLimits::new(1, 1), MAX_WAIT),
            small_parsed: slots(part(4) / 8),
            parsed: slots(part(4) / 8 * 7),
            parsed_bytes: part(4),
            large_bodies: AtomicU64::new(0),
        }
    }

    /// Number of large bodies read so far. After them, much memory may have become free.
    pub fn large_bodies(&self) -> u64 {
        self.large_bodies.load(Ordering::Relaxed)
    }

    /// A buffer for a body of at most `max_body` bytes.
    pub fn buffer(self: &Arc<Self>, tenant: Tenant, max_body: usize) -> BodyBuffer {
        BodyBuffer::new(self.clone(), tenant, max_body)
    }

    /// The share of a parsed body: `bytes` bytes with `values` JSON values.
    pub async fn parse(&self, tenant: Tenant, bytes: usize, values: usize) -> Result<BodyShare, BudgetError> {
        let needed = bytes + values * VALUE_BYTES;
        if needed > self.parsed_bytes {
            let max_values = self.parsed_bytes / VALUE_BYTES;
            return Err(BudgetError::TooManyValues { values, max_values, limit: self.limit });
        }
        let is_small = needed <= SMALL_PARSED.min(self.parsed_bytes / 64);
        self.acquire(if is_small { &self.small_parsed } else { &self.parsed }, tenant, needed).await
    }

    async fn acquire(&self, part: &Slots, tenant: Tenant, bytes: usize) -> Result<BodyShare, BudgetError> {
        let permits = part.acquire(tenant, units(bytes) as usize).await;
        permits.map(|permits| BodyShare(vec![permits])).map_err(|_| BudgetError::Busy { limit: self.limit })
    }
}

/// Permits for this many bytes.
fn units(bytes: usize) -> u32 {
    u32::try_from(bytes / UNIT).unwrap_or(u32::MAX)
}

/// A part of the budget.
fn slots(bytes: usize) -> Slots {
    let permits = (bytes / UNIT).min(u32::MAX as usize);
    Slots::new(QueueLimits::new(permits, permits / 4 * 3), MAX_WAIT)
}
