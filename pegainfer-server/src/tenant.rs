//! Whose request it is: that of an API key, or without keys that of an address.

use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;

/// Whose request it is. Tenants take turns in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Tenant {
    /// A hash of the API key or the address.
    pub id: u64,
    /// Whether it is an API key.
    pub has_key: bool,
}

impl Tenant {
    /// The tenant with this API key. The keys of `hasher` are drawn at start, so nobody can choose a key or an address that collides
    /// with another one.
    pub fn of_key(key: &str, hasher: &RandomState) -> Self {
        Self { id: hasher.hash_one(key), has_key: true }
    }

    /// The tenant at this address, of those without a key. An IPv6 client has a network of 64 bits, all of whose addresses are
    /// one tenant.
    pub fn of_address(address: IpAddr, hasher: &RandomState) -> Self {
        let network = match address {
            IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
            IpAddr::V6(address) if address.to_ipv4_mapped().is_some() => address.to_bits(),
            IpAddr::V6(address) => address.to_bits() >> 64,
        };
        Self { id: hasher.hash_one(network), has_key: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_a_network_is_one_tenant() {
        let hasher = RandomState::new();
        let tenant = |address: &str| Tenant::of_address(address.parse().unwrap(), &hasher);
        assert_eq!(tenant("10.0.0.1"), tenant("::ffff:10.0.0.1"));
        assert_ne!(tenant("10.0.0.1"), tenant("10.0.0.2"));
        assert_eq!(tenant("2001:db8::1"), tenant("2001:db8::ffff:1"));
        assert_ne!(tenant("2001:db8::1"), tenant("2001:db8:0:1::1"));
        assert_ne!(Tenant::of_key("a", &hasher), Tenant::of_key("b", &hasher));
    }
}
