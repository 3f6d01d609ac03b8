//! Shares of connections: a client may have a multiple of the free ones.
//!
//! The threshold falls as connections are taken, so that no client takes all of the last ones, however many clients are
//! greedy (dynamic thresholds of shared buffers: Choudhury and Hahne, IEEE/ACM Transactions on Networking, 1998).

use crate::tenant::Networks;
use std::collections::HashMap;

/// Connections of a client for each one that is free: alone it has three quarters of all.
const CLIENT: usize = 3;
/// The same for all clients of a network together: seven eighths.
const GROUP: usize = 7;

/// Connections of each network.
#[derive(Debug, Default)]
pub(super) struct Shares {
    clients: HashMap<(bool, u128), usize>,
    groups: HashMap<(bool, u128), usize>,
}

/// A network that has reached its share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Saturated {
    /// The network of one client.
    Client((bool, u128)),
    /// The network around it.
    Group((bool, u128)),
}

impl Saturated {
    /// True if a client with these networks belongs to it.
    pub fn has(self, networks: Networks) -> bool {
        match self {
            Self::Client(client) => client == networks.client,
            Self::Group(group) => group == networks.group,
        }
    }
}

impl Shares {
    /// The network of a new connection that may not have one more while `free` connections are free.
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
