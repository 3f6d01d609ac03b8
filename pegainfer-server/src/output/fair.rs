//! Max-min fairness: shares of the tenants in a budget that is too small for all.
//!
//! Every tenant keeps its bytes up to a common level, which is as high as the budget allows (Bertsekas and Gallager,
//! Data Networks, 1987). It is computed twice: for the networks of the tenants, and for the tenants of a network, so
//! that a client with many addresses competes as one.

use crate::tenant::Tenant;
use std::collections::HashMap;

/// Bytes held by tenants.
#[derive(Debug, Clone, Default)]
pub(super) struct TenantBytes {
    tenants: HashMap<Tenant, u64>,
    total: u64,
}

impl TenantBytes {
    pub fn total(&self) -> u64 {
        self.total
    }

    pub fn bytes(&self, tenant: Tenant) -> u64 {
        self.tenants.get(&tenant).copied().unwrap_or(0)
    }

    pub fn add(&mut self, tenant: Tenant, bytes: u64) {
        if bytes > 0 {
            *self.tenants.entry(tenant).or_default() += bytes;
            self.total += bytes;
        }
    }

    pub fn add_all(&mut self, other: &Self) {
        other.tenants.iter().for_each(|(tenant, bytes)| self.add(*tenant, *bytes));
    }

    /// Subtracts bytes that were added earlier.
    pub fn remove(&mut self, tenant: Tenant, bytes: u64) {
        let Some(held) = self.tenants.get_mut(&tenant) else { return };
        let bytes = bytes.min(*held);
        (*held, self.total) = (*held - bytes, self.total - bytes);
        if *held == 0 {
            self.tenants.remove(&tenant);
        }
    }

    /// Allowance of each tenant out of `limit` bytes.
    pub fn allowances(&self, limit: u64) -> Allowances {
        let mut groups: HashMap<u32, Vec<u64>> = HashMap::new();
        self.tenants.iter().for_each(|(tenant, bytes)| groups.entry(tenant.group()).or_default().push(*bytes));
        let group_level = level(groups.values().map(|members| members.iter().sum()).collect(), limit);
        groups.retain(|_, members| members.iter().sum::<u64>() > group_level);
        Allowances(groups.into_iter().map(|(group, members)| (group, level(members, group_level))).collect())
    }
}

/// Allowances of all tenants: a level for each group that exceeds its share.
#[derive(Debug)]
pub(super) struct Allowances(HashMap<u32, u64>);

impl Allowances {
    /// Maximum number of bytes that `tenant` may hold.
    pub fn bytes(&self, tenant: Tenant) -> u64 {
        self.0.get(&tenant.group()).copied().unwrap_or(u64::MAX)
    }
}

/// The level to which amounts are cut so that their sum is `limit`; `u64::MAX` if no cut is needed.
fn level(mut amounts: Vec<u64>, limit: u64) -> u64 {
    amounts.sort_unstable();
    let mut left = limit;
    for (place, &amount) in amounts.iter().enumerate() {
        let even = left / (amounts.len() - place) as u64;
        if amount > even {
            return even;
        }
        left -= amount;
    }
    u64::MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_level_is_what_the_small_ones_leave() {
        assert_eq!(level(vec![10, 20, 30], 60), u64::MAX);
        assert_eq!(level(vec![10, 80, 30], 100), 60);
        assert_eq!(level(vec![50, 50, 50], 100), 33);
        assert_eq!(level(vec![200], 100), 100);
        assert_eq!(level(vec![], 100), u64::MAX);
    }

    #[test]
    fn a_network_competes_as_one_and_then_among_itself() {
        let tenant = |group: u64, member: u64| Tenant { id: group << 32 | member, has_key: false };
        let mut held = TenantBytes::default();
        (0..100).for_each(|member| held.add(tenant(1, member), 10));
        held.add(tenant(2, 0), 400);
        held.add(tenant(3, 0), 50);
        let allowances = held.allowances(1000);
        assert_eq!(allowances.bytes(tenant(3, 0)), u64::MAX, "it asks for little");
        assert_eq!(allowances.bytes(tenant(2, 0)), u64::MAX, "less than the many addresses together");
        assert_eq!(allowances.bytes(tenant(1, 7)), 5, "550 left for 100 addresses");
        held.remove(tenant(1, 0), 10);
        held.add(tenant(1, 0), 1);
        assert_eq!(held.allowances(1000).bytes(tenant(1, 0)), 5);
        assert_eq!((held.bytes(tenant(1, 0)), held.total()), (1, 990 + 1 + 450));
    }
}
