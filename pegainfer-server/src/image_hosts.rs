//! The hosts that images may be fetched from: `--allowed-image-hosts`.

use crate::network::{Network, is_public};
use std::net::IpAddr;

/// One entry of `--allowed-image-hosts`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageHost {
    /// `*`: every host.
    Any,
    /// A host's name, in lower case.
    Name(String),
    /// `*.example.com`: every host below a domain, kept as `.example.com`.
    Below(String),
    /// An address, or a network of them, which need not be public.
    Network(Network),
}

impl ImageHost {
    /// Parses an entry of the flag.
    ///
    /// # Errors
    /// A sentence about text that is no host, such as a URL.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim().to_ascii_lowercase();
        if let Some(network) = Network::parse(text.trim_matches(['[', ']'])) {
            return Ok(Self::Network(network));
        }
        if text == "*" {
            return Ok(Self::Any);
        }
        let name = text.strip_prefix("*.").unwrap_or(&text);
        let is_label = |label: &str| {
            let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
            !label.is_empty() && label.bytes().all(is_valid)
        };
        if !name.split('.').all(is_label) {
            return Err(format!(
                "{text} is not a host such as example.com or *.example.com, nor a network such as 10.0.0.0/8; leave \
                 out scheme, port and path"
            ));
        }
        Ok(if name.len() < text.len() { Self::Below(format!(".{name}")) } else { Self::Name(text) })
    }
}

/// True if the list has a host with this name, or this address.
pub fn has_host(hosts: &[ImageHost], name: &str) -> bool {
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    let address: Option<IpAddr> = name.trim_matches(['[', ']']).parse().ok();
    hosts.iter().any(|host| match (host, address) {
        (ImageHost::Any, _) => true,
        (ImageHost::Network(network), Some(address)) => network.contains(address),
        (ImageHost::Name(own), None) => *own == name,
        (ImageHost::Below(domain), None) => name.ends_with(domain.as_str()),
        _ => false,
    })
}

/// True if a host may have this address: a public one, or one that the list names.
pub fn has_address(hosts: &[ImageHost], address: IpAddr) -> bool {
    let is_listed = |host: &ImageHost| matches!(host, ImageHost::Network(network) if network.contains(address));
    is_public(address) || hosts.iter().any(is_listed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(text: &str) -> Vec<ImageHost> {
        text.split(',').map(|entry| ImageHost::parse(entry).unwrap()).collect()
    }

    #[test]
    fn hosts_are_names_domains_and_networks() {
        let hosts = hosts("Example.com,*.cdn.example,10.1.0.0/16,[::1]");
        for name in ["example.com", "EXAMPLE.com.", "a.cdn.example", "a.b.cdn.example", "10.1.2.3", "[::1]"] {
            assert!(has_host(&hosts, name), "{name}");
        }
        for name in ["a.example.com", "cdn.example", "xcdn.example", "10.2.0.1", "[::2]", "1.1.1.1", "", "com"] {
            assert!(!has_host(&hosts, name), "{name}");
        }
        assert!(has_host(&self::hosts("*"), "1.1.1.1") && has_host(&self::hosts("*"), "a.b"));
    }

    #[test]
    fn only_listed_addresses_may_be_private() {
        let hosts = hosts("*,10.1.0.0/16");
        for (address, is_allowed) in [("1.1.1.1", true), ("10.1.2.3", true), ("10.2.0.1", false), ("::1", false)] {
            assert_eq!(has_address(&hosts, address.parse().unwrap()), is_allowed, "{address}");
        }
    }

    #[test]
    fn urls_and_ports_are_refused() {
        for text in ["https://example.com", "example.com:443", "example.com/a", "", "*.*", "a..b", "**", "10.0.0.0/33"]
        {
            assert!(ImageHost::parse(text).is_err(), "{text}");
        }
    }
}
