//! Compiled grammars kept for later requests: an agent sends the same tools with each request.

use crate::fair_queue::Permits;
use crate::tenant::Tenant;
use pegainfer_text::CompiledGrammar;
use std::sync::Arc;

/// Maximum number of cached grammars.
const CACHED: usize = 64;

/// SHA-256 of a source.
pub(super) type Key = [u8; 32];

/// A compiled grammar with the permits of its memory.
#[derive(Debug)]
pub struct AccountedGrammar {
    pub(super) grammar: Arc<CompiledGrammar>,
    pub(super) _memory: Permits,
}

/// A grammar in the cache.
pub(super) struct Cached {
    pub(super) key: Key,
    /// The tenant that it was compiled for, which is charged for its memory.
    pub(super) tenant: Tenant,
    pub(super) mebibytes: usize,
    pub(super) grammar: Arc<AccountedGrammar>,
}

/// Grammars by source. The tenant with the most grammars loses one first, so that no tenant evicts the grammars of
/// others.
#[derive(Default)]
pub(super) struct GrammarCache {
    /// Most recently used last.
    entries: Vec<Cached>,
}

impl GrammarCache {
    /// The grammar of a source, for any tenant.
    pub(super) fn get(&mut self, key: &Key) -> Option<Arc<AccountedGrammar>> {
        let at = self.entries.iter().position(|entry| entry.key == *key)?;
        let entry = self.entries.remove(at);
        let grammar = entry.grammar.clone();
        self.entries.push(entry);
        Some(grammar)
    }

    /// Adds a grammar. If there are too many, the tenant with the most entries loses its least recently used one.
    pub(super) fn insert(&mut self, new: Cached) {
        self.entries.retain(|entry| entry.key != new.key);
        if self.entries.len() >= CACHED {
            let largest = self.largest(new.tenant, |_| 1);
            if let Some(at) = self.entries.iter().position(|entry| Some(entry.tenant) == largest) {
                self.entries.remove(at);
            }
        }
        self.entries.push(new);
    }

    /// Removes the least recently used grammar to make space for one of `tenant`. It is one of its own, if `only_own`
    /// or if the tenant has as much cached memory as any other; otherwise one of the tenant with the most memory. A
    /// grammar that no request uses goes first, because only that frees memory immediately.
    pub(super) fn evict(&mut self, tenant: Tenant, only_own: bool) -> Option<Cached> {
        let idle = |entry: &Cached| if Arc::strong_count(&entry.grammar) == 1 { entry.mebibytes } else { 0 };
        let of = match only_own {
            true => tenant,
            false => self.largest(tenant, idle).or_else(|| self.largest(tenant, |entry| entry.mebibytes))?,
        };
        let of_tenant = |entry: &Cached| entry.tenant == of;
        let unused = self.entries.iter().position(|entry| of_tenant(entry) && idle(entry) > 0);
        let at = unused.or_else(|| self.entries.iter().position(of_tenant))?;
        Some(self.entries.remove(at))
    }

    /// Number of grammars of a tenant.
    #[cfg(test)]
    pub(super) fn count(&self, tenant: Tenant) -> usize {
        self.entries.iter().filter(|entry| entry.tenant == tenant).count()
    }

    /// The tenant with the largest sum. Ties go to `preferred`, then to the least recently used.
    fn largest(&self, preferred: Tenant, size: impl Fn(&Cached) -> usize) -> Option<Tenant> {
        let sum = |tenant| self.entries.iter().filter(|entry| entry.tenant == tenant).map(&size).sum::<usize>();
        let tenants = self.entries.iter().rev().map(|entry| (entry.tenant, sum(entry.tenant)));
        let largest = tenants.filter(|(_, sum)| *sum > 0).max_by_key(|(tenant, sum)| (*sum, *tenant == preferred));
        largest.map(|(tenant, _)| tenant)
    }
}
