//! Compiled grammars that are kept for later requests: the tools of an agent come with each of its requests.

use crate::tenant::Tenant;
use pegainfer_core::grammar::Grammar;
use std::sync::Arc;

/// Grammars that are kept.
const CACHED: usize = 64;

/// SHA-256 of a source.
pub(super) type Key = [u8; 32];

/// A grammar in the cache.
pub(super) struct Cached {
    pub(super) key: Key,
    /// The tenant that had it compiled, and holds its memory.
    pub(super) tenant: Tenant,
    pub(super) mebibytes: usize,
    pub(super) grammar: Arc<dyn Grammar>,
}

/// Grammars by their sources. The tenant that has the most loses one first, so that nobody evicts everybody's.
#[derive(Default)]
pub(super) struct GrammarCache {
    /// Most recently used last.
    entries: Vec<Cached>,
}

impl GrammarCache {
    /// The grammar of a source, for any tenant.
    pub(super) fn get(&mut self, key: &Key) -> Option<Arc<dyn Grammar>> {
        let at = self.entries.iter().position(|entry| entry.key == *key)?;
        let entry = self.entries.remove(at);
        let grammar = entry.grammar.clone();
        self.entries.push(entry);
        Some(grammar)
    }

    /// Keeps a grammar. If there are too many, the tenant with the most entries loses its least recently used one.
    pub(super) fn insert(&mut self, new: Cached) {
        self.entries.retain(|entry| entry.key != new.key);
        if self.entries.len() >= CACHED {
            let most = self.largest(|_| 1);
            if let Some(at) = self.entries.iter().position(|entry| Some(entry.tenant) == most) {
                self.entries.remove(at);
            }
        }
        self.entries.push(new);
    }

    /// Removes the least recently used grammar of a tenant, or of the one with the most memory in the cache; one that no request
    /// uses, if there is one, because only that frees memory at once.
    pub(super) fn evict(&mut self, of: Option<Tenant>) -> Option<Cached> {
        let idle = |entry: &Cached| Arc::strong_count(&entry.grammar) == 1;
        let of = of
            .or_else(|| self.largest(|entry| if idle(entry) { entry.mebibytes } else { 0 }))
            .or_else(|| self.largest(|entry| entry.mebibytes))?;
        let of_tenant = |entry: &Cached| entry.tenant == of;
        let unused = self.entries.iter().position(|entry| of_tenant(entry) && idle(entry));
        let at = unused.or_else(|| self.entries.iter().position(of_tenant))?;
        Some(self.entries.remove(at))
    }

    /// The tenant with the largest sum, if any has one; of equal ones the least recently used.
    fn largest(&self, size: impl Fn(&Cached) -> usize) -> Option<Tenant> {
        let sum = |tenant| self.entries.iter().filter(|entry| entry.tenant == tenant).map(&size).sum::<usize>();
        let tenants = self.entries.iter().rev().map(|entry| entry.tenant);
        tenants
            .map(|tenant| (tenant, sum(tenant)))
            .filter(|(_, sum)| *sum > 0)
            .max_by_key(|(_, sum)| *sum)
            .map(|(t, _)| t)
    }
}
