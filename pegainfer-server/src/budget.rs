//! Memory of requests that the engine does not have yet: bodies while they are read, and what they are parsed into; and of large
//! responses.
//!
//! One budget, `--max-inflight-bytes`, in three parts, so that no two requests wait for each other:
//!
//! - An eighth for bodies up to [`SMALL_BODY`]: ordinary requests are read even when clients fill the rest with large ones.
//! - Three eighths for larger bodies. Where they are used up, one body at a time goes on without a share, so that bodies
//!   that hold a part each cannot block each other.
//! - Half for parsed bodies. A parsed body holds its share until it is submitted to the engine.
//!
//! A body takes its share as its bytes come, whatever its head announced.
//!
//! Large responses may take as much again. They have a budget of their own because a client decides how long they are held:
//! until it has read them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use thiserror::Error;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};

/// Default of `--max-inflight-bytes`.
pub const DEFAULT_BYTES: u64 = 256 << 20;
/// Smallest value of `--max-inflight-bytes`.
pub const MIN_BYTES: u64 = 1 << 20;
/// Largest body that takes its share from the part for small ones.
pub const SMALL_BODY: usize = 64 << 10;
/// Bytes of a parsed JSON value: a node of the tree, and what its list or object has allocated beyond it.
const VALUE_BYTES: usize = 128;
/// Bytes of one permit of the semaphores.
const UNIT: usize = 1 << 10;
/// Time that a request waits for its share before it is refused.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// Why a request got no memory.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BudgetError {
    /// Other requests have all of it.
    #[error(
        "the requests that are being read take all of the {limit} bytes that they may take together \
         (--max-inflight-bytes); try again later"
    )]
    Busy {
        /// Bytes of the budget.
        limit: u64,
    },
    /// Other responses have all of theirs.
    #[error(
        "the large responses that are generated or wait for their clients take all of the {limit} bytes that they may take \
         together (--max-inflight-bytes); try again later, or ask for fewer log-probabilities"
    )]
    Responses {
        /// Bytes of the budget.
        limit: u64,
    },
    /// The request alone is too much.
    #[error(
        "the request body has {values} JSON values, which take more memory than one request may have: at most {most} \
         values (--max-inflight-bytes is {limit})"
    )]
    TooManyValues {
        /// Values of the body.
        values: usize,
        /// Values of a body that has no text.
        most: usize,
        /// Bytes of the budget.
        limit: u64,
    },
}

/// The budget of all requests.
#[derive(Debug)]
pub struct Budget {
    limit: u64,
    small: Arc<Semaphore>,
    large: Arc<Semaphore>,
    /// One permit: the body that goes on without a share.
    exempt: Arc<Semaphore>,
    parsed: Arc<Semaphore>,
    parsed_bytes: usize,
    responses: Arc<Semaphore>,
    /// Bodies beyond [`SMALL_BODY`] so far.
    large_bodies: AtomicU64,
}

/// A share of the budget; given back when it is dropped.
#[derive(Debug, Default)]
pub struct Share(Vec<OwnedSemaphorePermit>);

impl Budget {
    /// A budget of `limit` bytes, at least [`MIN_BYTES`].
    pub fn new(limit: u64) -> Self {
        let limit = limit.max(MIN_BYTES);
        let part = |eighths: u64| (limit / 8 * eighths) as usize;
        let semaphore = |bytes: usize| Arc::new(Semaphore::new((bytes / UNIT).min(u32::MAX as usize)));
        Self {
            limit,
            small: semaphore(part(1)),
            large: semaphore(part(3)),
            exempt: Arc::new(Semaphore::new(1)),
            parsed: semaphore(part(4)),
            parsed_bytes: part(4),
            responses: semaphore(part(8)),
            large_bodies: AtomicU64::new(0),
        }
    }

    /// Number of large bodies that were read so far: after them, much memory may have become free.
    pub fn large_bodies(&self) -> u64 {
        self.large_bodies.load(Ordering::Relaxed)
    }

    /// A buffer for a body of at most `max_body` bytes.
    pub fn buffer(self: &Arc<Self>, max_body: usize) -> BodyBuffer {
        BodyBuffer { budget: self.clone(), max_body, bytes: Vec::new(), share: Share::default(), exempt: false }
    }

    /// The share of a body that is parsed: `bytes` bytes that hold `values` JSON values.
    pub async fn parse(&self, bytes: usize, values: usize) -> Result<Share, BudgetError> {
        let needed = bytes + values * VALUE_BYTES;
        if needed > self.parsed_bytes {
            let most = self.parsed_bytes / VALUE_BYTES;
            return Err(BudgetError::TooManyValues { values, most, limit: self.limit });
        }
        self.take(&self.parsed, needed).await
    }

    /// The share of a response of at most `bytes` bytes; waits for it. A response that is larger than the budget takes all of it.
    pub async fn response(&self, bytes: usize) -> Result<Share, BudgetError> {
        let share = self.take(&self.responses, bytes.min(self.limit as usize)).await;
        share.map_err(|_| BudgetError::Responses { limit: self.limit })
    }

    /// Adds `bytes` bytes to the share of a response. Does not wait: what the response has already would wait with it.
    pub fn grow_response(&self, share: &mut Share, bytes: usize) -> Result<(), BudgetError> {
        let permit = self.responses.clone().try_acquire_many_owned(units(bytes));
        let permit = permit.map_err(|_| BudgetError::Responses { limit: self.limit })?;
        match share.0.first_mut() {
            Some(first) => first.merge(permit),
            None => share.0.push(permit),
        }
        Ok(())
    }

    async fn take(&self, part: &Arc<Semaphore>, bytes: usize) -> Result<Share, BudgetError> {
        let permit = part.clone().acquire_many_owned(units(bytes));
        // The semaphores are never closed.
        let permit = timeout(MAX_WAIT, permit).await.ok().and_then(Result::ok);
        permit.map(|permit| Share(vec![permit])).ok_or(BudgetError::Busy { limit: self.limit })
    }
}

impl Share {
    /// Gives back what is beyond `bytes` bytes.
    pub fn shrink(&mut self, bytes: usize) {
        for permit in &mut self.0 {
            let beyond = permit.num_permits().saturating_sub(units(bytes) as usize + 1);
            drop(permit.split(beyond));
        }
    }
}

/// Permits for this many bytes.
fn units(bytes: usize) -> u32 {
    u32::try_from(bytes / UNIT).unwrap_or(u32::MAX)
}

/// The bytes of a body so far, and their share of the budget.
#[derive(Debug)]
pub struct BodyBuffer {
    budget: Arc<Budget>,
    max_body: usize,
    bytes: Vec<u8>,
    share: Share,
    /// It goes on without a share.
    exempt: bool,
}

impl BodyBuffer {
    /// Appends bytes; waits until the budget has a share for them. The caller keeps to `max_body`.
    pub async fn push(&mut self, frame: &[u8]) -> Result<(), BudgetError> {
        let needed = self.bytes.len() + frame.len();
        if needed > self.bytes.capacity() {
            self.grow(needed).await?;
        }
        self.bytes.extend_from_slice(frame);
        Ok(())
    }

    /// The body, and its share.
    pub fn finish(self) -> (Vec<u8>, Share) {
        (self.bytes, self.share)
    }

    async fn grow(&mut self, needed: usize) -> Result<(), BudgetError> {
        let doubled = (2 * self.bytes.capacity()).max(4 * UNIT).min(self.max_body);
        let capacity = needed.max(doubled);
        if !self.exempt {
            self.take(capacity).await?;
        }
        self.bytes.reserve_exact(capacity - self.bytes.len());
        Ok(())
    }

    /// Takes the share of `capacity` bytes beyond that of the bytes so far.
    async fn take(&mut self, capacity: usize) -> Result<(), BudgetError> {
        let (budget, held) = (&self.budget, self.bytes.capacity());
        if capacity <= SMALL_BODY {
            let more = budget.take(&budget.small, capacity - held).await?;
            self.share.0.extend(more.0);
            return Ok(());
        }
        // The share of a body that outgrows the part for small ones moves to the other part.
        let moves = held <= SMALL_BODY;
        let more = units(if moves { capacity } else { capacity - held });
        let permit = tokio::select! {
            biased;
            permit = budget.large.clone().acquire_many_owned(more) => permit,
            permit = budget.exempt.clone().acquire_owned() => {
                self.exempt = true;
                permit
            }
            () = sleep(MAX_WAIT) => return Err(BudgetError::Busy { limit: budget.limit }),
        };
        if moves {
            budget.large_bodies.fetch_add(1, Ordering::Relaxed);
            self.share.0.clear();
        }
        self.share.0.extend(permit.ok());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    const MIB: usize = 1 << 20;

    /// Whether a body of `bytes` more bytes can be read at once.
    fn reads(buffer: &mut BodyBuffer, bytes: usize) -> bool {
        let frame = vec![0; bytes];
        buffer.push(&frame).now_or_never().is_some()
    }

    #[tokio::test]
    async fn large_bodies_leave_memory_for_small_ones_and_one_of_them_always_goes_on() {
        let budget = Arc::new(Budget::new(8 * MIB as u64));
        let mut bodies: Vec<BodyBuffer> = (0..8).map(|_| budget.buffer(2 * MIB)).collect();
        let going: Vec<bool> = bodies.iter_mut().map(|body| reads(body, MIB)).collect();
        assert_eq!(going, [true, true, true, true, false, false, false, false], "3 of 8 MiB, and one body more");
        let mut small = budget.buffer(2 * MIB);
        assert!(reads(&mut small, 60_000) && !reads(&mut small, 60_000));
        assert!(reads(&mut bodies[3], MIB), "the one without a share");
        assert!(!reads(&mut bodies[0], MIB));
        let exempt = bodies.remove(3);
        drop(exempt.finish());
        assert!(reads(&mut bodies[0], MIB), "the next one goes on");
        drop((bodies, small));
        assert_eq!(budget.large.available_permits(), 3 << 10);
        assert_eq!((budget.small.available_permits(), budget.exempt.available_permits()), (1 << 10, 1));
    }

    #[tokio::test]
    async fn a_body_of_too_many_values_is_refused_by_name() {
        let budget = Budget::new(8 * MIB as u64);
        let error = budget.parse(100_000, 50_000).await.unwrap_err().to_string();
        assert!(error.contains("has 50000 JSON values") && error.contains("at most 32768"), "{error}");
        assert!(error.contains("(--max-inflight-bytes is 8388608)"), "{error}");
        let share = budget.parse(1000, 30_000).await.unwrap();
        assert!(budget.parse(1000, 30_000).now_or_never().is_none(), "it waits");
        drop(share);
        assert!(budget.parse(1000, 30_000).now_or_never().is_some());
    }

    #[tokio::test]
    async fn responses_have_a_budget_of_their_own() {
        let budget = Budget::new(8 * MIB as u64);
        let mut large = budget.response(usize::MAX >> 4).await.unwrap();
        assert!(budget.response(MIB).now_or_never().is_none(), "one response of any size");
        assert!(budget.parse(1000, 30_000).now_or_never().is_some(), "bodies are parsed nevertheless");
        large.shrink(5 * MIB);
        let mut growing = budget.response(0).await.unwrap();
        budget.grow_response(&mut growing, 2 * MIB).unwrap();
        let error = budget.grow_response(&mut growing, MIB).unwrap_err().to_string();
        assert!(error.contains("all of the 8388608 bytes") && error.contains("(--max-inflight-bytes)"), "{error}");
        drop(large);
        budget.grow_response(&mut growing, 6 * MIB).unwrap();
        drop(growing);
        assert_eq!(budget.responses.available_permits(), 8 << 10);
    }
}
