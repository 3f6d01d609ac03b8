//! Networks of addresses, and which addresses are public.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A network of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    /// Number of leading bits that its addresses share.
    prefix: u32,
}

impl Network {
    /// Parses an address, or a network such as `10.0.0.0/8`.
    pub fn parse(text: &str) -> Option<Self> {
        let (address, prefix) = text.split_once('/').map_or((text, None), |(address, prefix)| (address, Some(prefix)));
        let address = address.parse::<IpAddr>().ok()?.to_canonical();
        let bits = if address.is_ipv4() { 32 } else { 128 };
        let is_number = |text: &&str| text.bytes().all(|byte| byte.is_ascii_digit());
        let prefix = prefix.map_or(Some(bits), |prefix| Some(prefix).filter(is_number)?.parse().ok())?;
        (prefix <= bits).then_some(Self { address, prefix })
    }

    /// True if the address lies in the network.
    pub fn contains(self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                (own.to_bits() ^ other.to_bits()).checked_shr(32 - self.prefix).unwrap_or(0) == 0
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                (own.to_bits() ^ other.to_bits()).checked_shr(128 - self.prefix).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

/// True for addresses of the public Internet: all but those that IANA's registries reserve for a host, a site, tests,
/// translation, multicast or the future (RFC 6890 and its successors).
pub fn is_public(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let special = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_documentation()
        // This network, multicast, and reserved: 0/8, 224/4, 240/4.
        || a == 0
        || a >= 224
        // Carriers' own networks, protocol assignments, 6to4 relays, benchmarks.
        || (a == 100 && b & 0xc0 == 64)
        || (a == 192 && b == 0 && c == 0)
        || (a == 192 && b == 88 && c == 99)
        || (a == 198 && b & 0xfe == 18);
    !special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let [a, b, ..] = address.segments();
    // 2000::/3 is what IANA allocates. In it, protocol assignments with Teredo, documentation, and 6to4 are special.
    let special = match a {
        0x2001 => b < 0x200 || b == 0xdb8,
        0x3fff => b < 0x1000,
        _ => a == 0x2002,
    };
    a & 0xe000 == 0x2000 && !special
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_the_public_internet_are_public() {
        let public = |text: &str| is_public(text.parse().unwrap());
        for text in ["1.1.1.1", "100.63.0.1", "100.128.0.1", "172.32.0.1", "192.0.1.1", "198.20.0.1", "223.255.255.255"]
        {
            assert!(public(text), "{text}");
        }
        for text in ["2606:4700::1111", "2001:4860:4860::8888", "2a00::1", "::ffff:1.1.1.1"] {
            assert!(public(text), "{text}");
        }
        for text in [
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "127.0.0.1",
            "127.255.0.1",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.0.1",
            "192.0.0.1",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.0.1",
            "198.18.0.1",
            "198.19.0.1",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
        ] {
            assert!(!public(text), "{text}");
            assert!(!public(&format!("::ffff:{text}")), "{text} in IPv6");
        }
        for text in [
            "::",
            "::1",
            "::7f00:1",
            "64:ff9b::7f00:1",
            "64:ff9b:1::a00:1",
            "100::1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "3fff::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "ff02::1",
        ] {
            assert!(!public(text), "{text}");
        }
    }
}
