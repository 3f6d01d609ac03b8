//! Limit on the running and waiting requests of one tenant.

use crate::tenant::Tenant;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of open requests of each tenant.
#[derive(Debug)]
pub struct Quota {
    max_requests: usize,
    open: Mutex<HashMap<Tenant, usize>>,
}

/// An open request, counted until it is dropped.
#[derive(Debug)]
pub struct OpenRequest {
    quota: Arc<Quota>,
    tenant: Tenant,
}

impl Quota {
    /// A limit of `max_requests` open requests per tenant.
    pub fn new(max_requests: usize) -> Self {
        Self { max_requests, open: Mutex::default() }
    }

    /// Enters `n` requests of a tenant, all or none. The error is a sentence for the client.
    pub fn enter(self: &Arc<Self>, tenant: Tenant, n: usize) -> Result<Vec<OpenRequest>, String> {
        let mut counts = self.counts();
        let open = counts.get(&tenant).copied().unwrap_or(0);
        if n > self.max_requests.saturating_sub(open) {
            let whose = if tenant.has_key { "API key" } else { "address" };
            return Err(format!(
                "this {whose} has {open} requests that run or wait, and asks for {n} more, but may have {} \
                 (--max-requests-per-key); try again later",
                self.max_requests
            ));
        }
        counts.insert(tenant, open + n);
        drop(counts);
        Ok((0..n).map(|_| OpenRequest { quota: self.clone(), tenant }).collect())
    }

    fn counts(&self) -> MutexGuard<'_, HashMap<Tenant, usize>> {
        // Nothing that can panic runs under the lock.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        let mut counts = self.quota.counts();
        if let Some(open) = counts.get_mut(&self.tenant) {
            *open -= 1;
            if *open == 0 {
                counts.remove(&self.tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_has_only_so_many_open_requests() {
        let quota = Arc::new(Quota::new(3));
        let [one, other] = [1, 2].map(|id| Tenant { id, has_key: true });
        let two = quota.enter(one, 2).unwrap();
        let refusal = quota.enter(one, 2).unwrap_err();
        assert!(
            refusal.contains("has 2 requests") && refusal.contains("may have 3 (--max-requests-per-key)"),
            "{refusal}"
        );
        assert!(quota.enter(other, 3).is_ok() && quota.enter(one, 1).is_ok());
        drop(two);
        assert_eq!(quota.enter(one, 3).unwrap().len(), 3);
        assert!(quota.counts().is_empty(), "nothing is left of those that have ended");
    }
}
