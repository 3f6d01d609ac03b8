//! A fair queue of permits for threads, processes or memory that requests share before they reach the engine.
//!
//! Groups of tenants take turns, and so do the tenants of a group. Each tenant has limits on its permits, its waiting
//! requests and its waiting time. [`FairQueue`] decides which request is next; [`Slots`] lets tasks wait.

mod queue;
#[cfg(test)]
mod tests;

use crate::tenant::Tenant;
pub use queue::{Entry, FairQueue, QueueFull, QueueLimits, Ticket};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use thiserror::Error;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Maximum time that a request waits for one queue.
pub const MAX_WAIT: Duration = Duration::from_secs(30);

/// Why a request got no permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum QueueError {
    /// Too many requests of the tenant wait.
    #[error("{0} other requests of this client are already waiting")]
    TenantFull(usize),
    /// Too many requests of all tenants wait.
    #[error("{0} other requests are already waiting")]
    Full(usize),
    /// The request's turn did not come in time.
    #[error("its turn did not come within {} s", .0.as_secs_f64())]
    TimedOut(Duration),
}

/// Permits that tenants take in turn. Clones share them.
pub struct Slots(Arc<Inner>);

struct Inner {
    limits: QueueLimits,
    max_wait: Duration,
    state: Mutex<State>,
}

struct State {
    queue: FairQueue<Tenant>,
    /// Channels to the waiting requests.
    waiters: HashMap<Ticket, oneshot::Sender<Permits>>,
}

/// Permits of one tenant. Dropping them gives them back.
pub struct Permits {
    slots: Arc<Inner>,
    tenant: Tenant,
    count: usize,
}

/// Permits, or the channel to wait for them.
enum Entered {
    Granted(Permits),
    Waits(Ticket, oneshot::Receiver<Permits>),
}

impl Slots {
    /// A queue with these limits. A request that waits longer than `max_wait` is refused.
    pub fn new(limits: QueueLimits, max_wait: Duration) -> Self {
        let state =
            State { queue: FairQueue::new(limits, |tenant| u64::from(tenant.group())), waiters: HashMap::new() };
        Self(Arc::new(Inner { limits, max_wait, state: Mutex::new(state) }))
    }

    /// Waits for `count` permits, at most all of them. Returns immediately for 0. Dropping the future leaves no trace.
    ///
    /// # Errors
    /// Too many requests wait, or this one has waited too long.
    pub async fn acquire(&self, tenant: Tenant, count: usize) -> Result<Permits, QueueError> {
        let count = count.min(self.0.limits.permits);
        if count == 0 {
            return Ok(self.permits(tenant, 0));
        }
        let (ticket, receiver) = match self.enter(tenant, count)? {
            Entered::Granted(permits) => return Ok(permits),
            Entered::Waits(ticket, receiver) => (ticket, receiver),
        };
        let _place = Place { slots: &self.0, tenant, ticket };
        // The sender is dropped only after it has sent the permits.
        timeout(self.0.max_wait, receiver).await.ok().and_then(Result::ok).ok_or(QueueError::TimedOut(self.0.max_wait))
    }

    /// Takes free permits if no request waits.
    pub fn try_acquire(&self, tenant: Tenant, count: usize) -> Option<Permits> {
        let mut state = self.0.state();
        match state.queue.enter(tenant, count) {
            Ok(Entry::Granted) => Some(self.permits(tenant, count.min(self.0.limits.permits))),
            Ok(Entry::Waits(ticket)) => {
                state.queue.leave(tenant, ticket);
                None
            }
            Err(_) => None,
        }
    }

    /// Number of free permits.
    pub fn free(&self) -> usize {
        self.0.state().queue.free()
    }

    /// True if the tenant may hold `count` more permits.
    pub fn may_hold(&self, tenant: Tenant, count: usize) -> bool {
        self.0.state().queue.may_hold(&tenant, count.min(self.0.limits.permits))
    }

    /// Number of waiting requests.
    pub fn waiting(&self) -> usize {
        self.0.state().queue.waiting()
    }

    fn enter(&self, tenant: Tenant, count: usize) -> Result<Entered, QueueError> {
        let mut state = self.0.state();
        match state.queue.enter(tenant, count) {
            Ok(Entry::Granted) => Ok(Entered::Granted(self.permits(tenant, count))),
            Ok(Entry::Waits(ticket)) => {
                let (sender, receiver) = oneshot::channel();
                state.waiters.insert(ticket, sender);
                Ok(Entered::Waits(ticket, receiver))
            }
            Err(QueueFull::Tenant) => Err(QueueError::TenantFull(self.0.limits.waiting_per_tenant)),
            Err(QueueFull::Total) => Err(QueueError::Full(self.0.limits.waiting)),
        }
    }

    fn permits(&self, tenant: Tenant, count: usize) -> Permits {
        Permits { slots: self.0.clone(), tenant, count }
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the queue, then sends permits to the requests that are next.
    fn change(self: &Arc<Self>, change: impl FnOnce(&mut State)) {
        let mut granted = Vec::new();
        let mut state = self.state();
        change(&mut state);
        while let Some((tenant, ticket, count)) = state.queue.grant_next() {
            granted.push((state.waiters.remove(&ticket), Permits { slots: self.clone(), tenant, count }));
        }
        drop(state);
        for (waiter, permits) in granted {
            // The waiter may have left. Its permits then come back here.
            let _ = waiter.map(|waiter| waiter.send(permits));
        }
    }
}

/// The place of a waiting request. Dropping it leaves the queue.
struct Place<'a> {
    slots: &'a Arc<Inner>,
    tenant: Tenant,
    ticket: Ticket,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        // A request that has its permits no longer waits.
        self.slots.change(|state| {
            if state.waiters.remove(&self.ticket).is_some() {
                state.queue.leave(self.tenant, self.ticket);
            }
        });
    }
}

impl Permits {
    /// Number of permits.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Gives back all but `count` permits.
    pub fn shrink(&mut self, count: usize) {
        let beyond = self.count.saturating_sub(count);
        if beyond > 0 {
            self.count = count;
            self.slots.change(|state| state.queue.release(self.tenant, beyond));
        }
    }

    /// Adds the permits of `other`, which belong to the same queue and tenant.
    pub fn merge(&mut self, mut other: Self) {
        self.count += std::mem::take(&mut other.count);
    }
}

impl Drop for Permits {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

impl Clone for Slots {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slots").field("limits", &self.0.limits).finish_non_exhaustive()
    }
}

impl fmt::Debug for Permits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permits").field("count", &self.count).finish_non_exhaustive()
    }
}
