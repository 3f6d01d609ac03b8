//! The tenant of a request: its API key, or without keys its address.

use crate::keyed_hash::KeyedHash;
use std::hash::BuildHasher;
use std::net::IpAddr;

/// The owner of a request. Queues are fair between groups of tenants, then between the tenants of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Tenant {
    /// A hash of the API key or the address. Its upper half is the group.
    pub id: u64,
    /// True if the tenant is an API key.
    pub has_key: bool,
}

impl Tenant {
    /// The tenant of this API key, in its own group. The keys of `hasher` are random, so nobody can choose an API key
    /// or address that collides with another one.
    pub fn from_key(key: &str, hasher: &KeyedHash) -> Self {
        Self { id: hasher.hash_one(key), has_key: true }
    }

    /// The tenant of this address, without a key. Its group is the surrounding network, because a client with many
    /// addresses usually has them in one network.
    pub fn from_address(address: IpAddr, hasher: &KeyedHash) -> Self {
        let Networks { client, group } = Networks::from_address(address);
        let half = |network: (bool, u128)| hasher.hash_one(network) & u64::from(u32::MAX);
        Self { id: half(group) << 32 | half(client), has_key: false }
    }

    /// The group of the tenant.
    pub fn group(self) -> u32 {
        (self.id >> 32) as u32
    }
}

/// The networks of an address. Each is a prefix with a flag for IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Networks {
    /// Network of one client: an IPv4 address or an IPv6 /64.
    pub client: (bool, u128),
    /// Network that may belong to one person: an IPv4 /24 or an IPv6 /48.
    pub group: (bool, u128),
}

impl Networks {
    /// The networks of `address`.
    pub fn from_address(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => {
                let bits = u128::from(address.to_bits());
                Self { client: (false, bits), group: (false, bits >> 8) }
            }
            IpAddr::V6(address) => {
                let bits = address.to_bits();
                Self { client: (true, bits >> 64), group: (true, bits >> 80) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_a_network_is_one_tenant() {
        let hasher = KeyedHash::default();
        let tenant = |address: &str| Tenant::from_address(address.parse().unwrap(), &hasher);
        assert_eq!(tenant("10.0.0.1"), tenant("::ffff:10.0.0.1"));
        assert_ne!(tenant("10.0.0.1"), tenant("10.0.0.2"));
        assert_eq!(tenant("2001:db8::1"), tenant("2001:db8::ffff:1"));
        assert_ne!(tenant("2001:db8::1"), tenant("2001:db8:0:1::1"));
        assert_ne!(Tenant::from_key("a", &hasher), Tenant::from_key("b", &hasher));
    }

    #[test]
    fn neighbours_are_of_one_group() {
        let hasher = KeyedHash::default();
        let group = |address: &str| Tenant::from_address(address.parse().unwrap(), &hasher).group();
        assert_eq!(group("127.0.1.7"), group("127.0.1.200"));
        assert_ne!(group("127.0.1.7"), group("127.0.0.9"));
        assert_eq!(group("2001:db8:1:2::1"), group("2001:db8:1:ffff::1"));
        assert_ne!(group("2001:db8:1::1"), group("2001:db8:2::1"));
        let keys: Vec<u32> = ["a", "b", "c"].map(|key| Tenant::from_key(key, &hasher).group()).into();
        assert!(keys[0] != keys[1] && keys[1] != keys[2], "each key is a group of its own");
    }
}
