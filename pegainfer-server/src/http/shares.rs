//! Limits of connections per client, as a multiple of the free connections.
//!
//! The limit falls as connections are taken, so that greedy clients, however many, cannot take the last ones (dynamic
//! thresholds of shared buffers: Choudhury and Hahne, IEEE/ACM Transactions on Networking, 1998).

use crate::tenant::Networks;
use std::collections::HashMap;

/// Connections that a client may have for each free one. A single client gets three quarters of all.
const CLIENT: usize = 3;
/// Connections that all clients of a network may have for each free one. A single network gets seven eighths.
const GROUP: usize = 7;

/// Connections of each network.
#[derive(Debug, Default)]
pub(super) struct ConnectionShares {
    clients: HashMap<(bool, u128), usize>,
    groups: HashMap<(bool, u128), usize>,
}

/// A network that has reached its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Saturated {
    /// The network of one client.
    Client((bool, u128)),
    /// The network around it.
    Group((bool, u128)),
}

impl Saturated {
    /// True if a client in these networks belongs to the saturated one.
    pub fn has(self, networks: Networks) -> bool {
        match self {
            Self::Client(client) => client == networks.client,
            Self::Group(group) => group == networks.group,
        }
    }
}

impl ConnectionShares {
    /// The network whose limit a new connection would exceed, while `free` connections are free.
    pub fn saturated(&self, networks: Networks, free: usize) -> Option<Saturated> {
        let count = |of: &HashMap<_, usize>, network| of.get(&network).copied().unwrap_or(0);
        if count(&self.clients, networks.client) >= CLIENT * free.max(1) {
            return Some(Saturated::Client(networks.client));
        }
        (count(&self.groups, networks.group) >= GROUP * free.max(1)).then_some(Saturated::Group(networks.group))
    }

    pub fn enter(&mut self, networks: Networks) {
        *self.clients.entry(networks.client).or_default() += 1;
        *self.groups.entry(networks.group).or_default() += 1;
    }

    pub fn leave(&mut self, networks: Networks) {
        for (counts, network) in [(&mut self.clients, networks.client), (&mut self.groups, networks.group)] {
            if let Some(count) = counts.get_mut(&network) {
                *count -= 1;
                if *count == 0 {
                    counts.remove(&network);
                }
            }
        }
    }
}
