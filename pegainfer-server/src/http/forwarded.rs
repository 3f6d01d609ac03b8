//! The address of a request's client: the peer of the connection or, if the peer is a trusted proxy, the address named
//! by the proxy.
//!
//! A proxy appends the address of its client to `X-Forwarded-For` or `Forwarded` (RFC 7239). Earlier entries came from
//! the client, who may write anything. The list is therefore read from its end: addresses of trusted proxies are
//! skipped, and the first other address is the client. Headers from any other peer are ignored.

use crate::network::Network;
use anyhow::{Result, ensure};
use axum::http::HeaderMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// The proxies of `--trusted-proxy`.
#[derive(Debug, Clone, Default)]
pub struct TrustedProxies(Arc<[Network]>);

impl TrustedProxies {
    /// Parses the values of the flag: addresses, or networks such as `10.0.0.0/8`.
    pub fn new(networks: &[String]) -> Result<Self> {
        let mut all = Vec::new();
        for text in networks {
            let network = Network::parse(text.trim());
            ensure!(network.is_some(), "--trusted-proxy {text} is not an address or a network such as 10.0.0.0/8");
            all.extend(network);
        }
        Ok(Self(all.into()))
    }

    /// True if a proxy at this address is trusted.
    pub fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|network| network.contains(address))
    }

    /// Address of the client of a request from `peer` with these headers.
    pub fn client(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        if !self.contains(peer) {
            return peer;
        }
        let (old, new) = (self.last_untrusted(headers, "x-forwarded-for"), self.last_untrusted(headers, "forwarded"));
        match (old, new) {
            // A proxy writes one of the headers. If the other one differs, the client may have written it.
            (Some(old), Some(new)) if old != new => peer,
            (old, new) => old.or(new).unwrap_or(peer),
        }
    }

    /// The last address of a header that is not a proxy's; `None` without one, or if an unreadable entry comes first.
    fn last_untrusted(&self, headers: &HeaderMap, name: &str) -> Option<IpAddr> {
        let hops = headers.get_all(name).iter().flat_map(|line| line.to_str().unwrap_or("?").split(','));
        let hops: Vec<&str> = hops.collect();
        let hops = hops.iter().rev().map(|hop| if name == "forwarded" { forwarded_for(hop) } else { address(hop) });
        hops.map_while(|hop| hop).find(|hop| !self.contains(*hop))
    }
}

/// The address of an element such as `for="[2001:db8::1]:4711";proto=https`.
fn forwarded_for(element: &str) -> Option<IpAddr> {
    let pairs = element.split(';').filter_map(|pair| pair.trim().split_once('='));
    let (_, node) = pairs.into_iter().find(|(name, _)| name.trim().eq_ignore_ascii_case("for"))?;
    address(node.trim().trim_matches('"'))
}

/// An address, with or without a port.
fn address(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    let parsed = bare.parse().ok().or_else(|| text.parse::<SocketAddr>().ok().map(|socket| socket.ip()));
    parsed.map(|address| address.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn proxies(networks: &[&str]) -> TrustedProxies {
        TrustedProxies::new(&networks.iter().map(|text| text.to_string()).collect::<Vec<_>>()).unwrap()
    }

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn networks_are_addresses_or_prefixes() {
        let trusted = proxies(&["10.0.0.0/8", "192.168.1.7", "2001:db8::/32", "::1"]);
        for inside in ["10.255.0.1", "::ffff:10.1.2.3", "192.168.1.7", "2001:db8:ffff::1", "::1"] {
            assert!(trusted.contains(ip(inside)), "{inside}");
        }
        for outside in ["11.0.0.1", "192.168.1.8", "2001:db9::1", "::2", "0.0.0.0"] {
            assert!(!trusted.contains(ip(outside)), "{outside}");
        }
        assert!(proxies(&["0.0.0.0/0"]).contains(ip("8.8.8.8")) && !proxies(&["0.0.0.0/0"]).contains(ip("::1")));
        assert!(proxies(&["::/0"]).contains(ip("2001::1")) && !TrustedProxies::default().contains(ip("::1")));
        for bad in ["", "10.0.0.0/33", "10.0.0.0/", "10.0.0.0/+8", "::/129", "proxy.example", "10.0.0"] {
            assert!(TrustedProxies::new(&[bad.into()]).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_client_is_the_last_address_that_is_no_proxy() {
        let trusted = proxies(&["10.0.0.0/8"]);
        let client = |peer: &str, lines: &[(&'static str, &str)]| trusted.client(ip(peer), &headers(lines)).to_string();
        let xff = "x-forwarded-for";
        assert_eq!(client("10.0.0.1", &[(xff, "203.0.113.7")]), "203.0.113.7");
        assert_eq!(client("10.0.0.1", &[(xff, "203.0.113.7, 10.0.0.2")]), "203.0.113.7", "two proxies");
        assert_eq!(client("10.0.0.1", &[(xff, "1.1.1.1, 203.0.113.7")]), "203.0.113.7", "the client's own claim");
        assert_eq!(client("10.0.0.1", &[(xff, "1.1.1.1"), (xff, "203.0.113.7")]), "203.0.113.7", "in lines");
        assert_eq!(client("10.0.0.1", &[(xff, "1.1.1.1, nonsense")]), "10.0.0.1", "nobody knows what it means");
        assert_eq!(client("10.0.0.1", &[(xff, "10.0.0.9")]), "10.0.0.1", "proxies only");
        assert_eq!(client("10.0.0.1", &[]), "10.0.0.1");
        assert_eq!(client("203.0.113.9", &[(xff, "1.1.1.1")]), "203.0.113.9", "it is no proxy");
        assert_eq!(client("10.0.0.1", &[(xff, "[2001:db8::1]:443")]), "2001:db8::1");
        assert_eq!(client("::ffff:10.0.0.1", &[(xff, "203.0.113.7:80")]), "203.0.113.7");
    }

    #[test]
    fn forwarded_is_read_and_must_not_contradict() {
        let trusted = proxies(&["10.0.0.0/8"]);
        let client = |lines: &[(&'static str, &str)]| trusted.client(ip("10.0.0.1"), &headers(lines)).to_string();
        assert_eq!(client(&[("forwarded", "for=1.1.1.1, For=\"203.0.113.7:80\";proto=https")]), "203.0.113.7");
        assert_eq!(client(&[("forwarded", "proto=https;for=\"[2001:db8::1]:4711\"")]), "2001:db8::1");
        assert_eq!(client(&[("forwarded", "for=1.1.1.1, for=_hidden")]), "10.0.0.1");
        assert_eq!(client(&[("forwarded", "for=1.1.1.1, proto=https")]), "10.0.0.1");
        let both = [("x-forwarded-for", "203.0.113.7"), ("forwarded", "for=1.1.1.1")];
        assert_eq!(client(&both), "10.0.0.1", "a proxy appends to one header and passes on the other one");
        assert_eq!(client(&[("x-forwarded-for", "203.0.113.7"), ("forwarded", "for=203.0.113.7")]), "203.0.113.7");
    }
}
