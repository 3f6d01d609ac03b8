//! Output that clients have not read: responses while they are generated, and bytes that wait for a client.
//!
//! Clients decide how long output waits, so it has a separate budget, as large as `--max-inflight-bytes`. Any tenant
//! may use all of it while nobody else needs it. When memory is short, tenants within their fair share ([`fair`])
//! continue. Tenants above it give memory back: their next large response is refused, and the connections with the most
//! unread output are closed. Until then the budget is exceeded, but never by more than its own size.
//!
//! - A response that is collected before it is sent takes a [`ResponseShare`] as it grows.
//! - Waiting output is counted by the [`Outbox`] of its connection: engine events that the response has not taken, and
//!   bytes that the socket has not written. [`OutputBudget::settle`] checks all connections a few times a second.

mod fair;
mod outbox;

use crate::budget::BudgetError;
use crate::tenant::Tenant;
use fair::TenantBytes;
pub use outbox::Outbox;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::timeout;

/// Maximum time that a response waits for its share.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// The budget of all output.
#[derive(Debug)]
pub struct OutputBudget {
    limit: u64,
    held: Mutex<Ledger>,
    /// Notified when memory is given back.
    freed: Notify,
}

/// Bytes held by each tenant.
#[derive(Debug, Default)]
struct Ledger {
    /// Shares of responses that are generated or written.
    granted: TenantBytes,
    /// Waiting output at the last check, plus large chunks since then.
    unread: TenantBytes,
}

impl Ledger {
    fn total(&self) -> u64 {
        self.granted.total() + self.unread.total()
    }
}

/// Unread output of one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unread {
    /// Tenant of the connection.
    pub tenant: Tenant,
    /// Bytes that wait.
    pub bytes: u64,
}

/// A share of the budget. Dropping it gives it back.
#[derive(Debug, Default)]
pub struct ResponseShare {
    /// `None` if the share was always empty.
    from: Option<(Arc<OutputBudget>, Tenant)>,
    bytes: u64,
}

impl OutputBudget {
    /// A budget of `limit` bytes.
    pub fn new(limit: u64) -> Self {
        Self { limit, held: Mutex::default(), freed: Notify::new() }
    }

    /// Waits for the share of a response of at most `bytes` bytes. A response that is larger than the budget takes all
    /// of it.
    pub async fn response(self: &Arc<Self>, tenant: Tenant, bytes: usize) -> Result<ResponseShare, BudgetError> {
        let bytes = bytes.min(usize::try_from(self.limit).unwrap_or(usize::MAX));
        let granted = async {
            loop {
                let mut freed = std::pin::pin!(self.freed.notified());
                freed.as_mut().enable();
                let mut share = ResponseShare::default();
                match self.grow(&mut share, tenant, bytes) {
                    Ok(()) => return share,
                    Err(_) => freed.await,
                }
            }
        };
        timeout(MAX_WAIT, granted).await.map_err(|_| BudgetError::Responses { limit: self.limit })
    }

    /// Adds `bytes` bytes to the share of a response. Does not wait, because the response would hold its share while
    /// waiting.
    pub fn grow(self: &Arc<Self>, share: &mut ResponseShare, tenant: Tenant, bytes: usize) -> Result<(), BudgetError> {
        let (mut ledger, bytes) = (self.ledger(), bytes as u64);
        if bytes > 0 && ledger.total() + bytes > self.limit {
            let mut held = ledger.granted.clone();
            held.add_all(&ledger.unread);
            held.add(tenant, bytes);
            if held.total() > 2 * self.limit || held.bytes(tenant) > held.allowances(self.limit).bytes(tenant) {
                return Err(BudgetError::Responses { limit: self.limit });
            }
        }
        ledger.granted.add(tenant, bytes);
        share.from.get_or_insert_with(|| (self.clone(), tenant));
        share.bytes += bytes;
        Ok(())
    }

    /// Counts a large chunk that a connection was just given, until the next [`settle`](Self::settle) includes it.
    pub fn add_chunk(&self, tenant: Tenant, bytes: usize) {
        self.ledger().unread.add(tenant, bytes as u64);
    }

    /// Updates the unread output of all connections. Returns the indices of connections to close so that the rest fits
    /// the budget: the largest ones of tenants above their fair share.
    pub fn settle(&self, connections: &[Unread]) -> Vec<usize> {
        let mut ledger = self.ledger();
        let mut unread = TenantBytes::default();
        connections.iter().for_each(|connection| unread.add(connection.tenant, connection.bytes));
        let shrinks = unread.total() < ledger.unread.total();
        ledger.unread = unread;
        let closed = if ledger.total() > self.limit { ledger.close_largest(connections, self.limit) } else { vec![] };
        drop(ledger);
        if shrinks || !closed.is_empty() {
            self.freed.notify_waiters();
        }
        closed
    }

    /// Bytes of unread output at the last check.
    pub fn unread(&self) -> u64 {
        self.ledger().unread.total()
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // Nothing that can panic runs under the lock.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ledger {
    fn close_largest(&mut self, connections: &[Unread], limit: u64) -> Vec<usize> {
        let mut held = self.granted.clone();
        held.add_all(&self.unread);
        let allowances = held.allowances(limit);
        let mut places: Vec<usize> = (0..connections.len()).collect();
        places.sort_by_key(|&place| std::cmp::Reverse(connections[place].bytes));
        let mut closed = Vec::new();
        for place in places {
            let Unread { tenant, bytes } = connections[place];
            if self.total() <= limit {
                break;
            }
            if bytes > 0 && self.granted.bytes(tenant) + self.unread.bytes(tenant) > allowances.bytes(tenant) {
                self.unread.remove(tenant, bytes);
                closed.push(place);
            }
        }
        closed
    }
}

impl ResponseShare {
    /// Gives back the share beyond `bytes` bytes.
    pub fn shrink(&mut self, bytes: usize) {
        let beyond = self.bytes.saturating_sub(bytes as u64);
        let Some((budget, tenant)) = self.from.as_ref().filter(|_| beyond > 0) else { return };
        budget.ledger().granted.remove(*tenant, beyond);
        self.bytes -= beyond;
        budget.freed.notify_waiters();
    }
}

impl Drop for ResponseShare {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

#[cfg(test)]
mod tests;
