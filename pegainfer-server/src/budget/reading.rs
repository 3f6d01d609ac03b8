//! The memory of a body while it is read.

use super::{BodyShare, Budget, BudgetError, SMALL_BODY, UNIT};
use crate::fair_queue::Slots;
use crate::tenant::Tenant;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The bytes of a body so far, and their share of the budget.
#[derive(Debug)]
pub struct BodyBuffer {
    budget: Arc<Budget>,
    tenant: Tenant,
    max_body: usize,
    bytes: Vec<u8>,
    share: BodyShare,
    /// True if the body continues without a share.
    exempt: bool,
}

impl BodyBuffer {
    pub(super) fn new(budget: Arc<Budget>, tenant: Tenant, max_body: usize) -> Self {
        Self { budget, tenant, max_body, bytes: Vec::new(), share: BodyShare::default(), exempt: false }
    }

    /// Appends bytes, after waiting for their share of the budget. The caller checks `max_body`.
    pub async fn push(&mut self, frame: &[u8]) -> Result<(), BudgetError> {
        let needed = self.bytes.len() + frame.len();
        if needed > self.bytes.capacity() {
            self.grow(needed).await?;
        }
        self.bytes.extend_from_slice(frame);
        Ok(())
    }

    /// The body, and its share.
    pub fn finish(self) -> (Vec<u8>, BodyShare) {
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

    /// Takes the additional share for a capacity of `capacity` bytes.
    async fn take(&mut self, capacity: usize) -> Result<(), BudgetError> {
        let (budget, tenant, held) = (&self.budget, self.tenant, self.bytes.capacity());
        if capacity <= SMALL_BODY {
            let (share, exempt) = budget.acquire_or_exempt(&budget.small, tenant, capacity - held).await?;
            self.exempt = exempt;
            self.share.0.extend(share.0);
            return Ok(());
        }
        // A body that outgrows the part for small ones moves its share to the other part.
        let moves = held <= SMALL_BODY;
        let more = if moves { capacity } else { capacity - held };
        let (share, exempt) = budget.acquire_or_exempt(&budget.large, tenant, more).await?;
        self.exempt = exempt;
        if moves {
            budget.large_bodies.fetch_add(1, Ordering::Relaxed);
            self.share.0.clear();
        }
        self.share.0.extend(share.0);
        Ok(())
    }
}

impl Budget {
    /// A share of a part, or the permit to continue without one; true for the permit.
    async fn acquire_or_exempt(
        &self,
        part: &Slots,
        tenant: Tenant,
        bytes: usize,
    ) -> Result<(BodyShare, bool), BudgetError> {
        tokio::select! {
            biased;
            share = self.acquire(part, tenant, bytes) => Ok((share?, false)),
            Ok(permit) = self.exempt.acquire(tenant, 1) => Ok((BodyShare(vec![permit]), true)),
        }
    }
}
