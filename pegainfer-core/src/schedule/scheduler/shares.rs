//! Number of running sequences of each tenant, and state of yielding.

use crate::schedule::sequence::Sequence;
use crate::schedule::turns::group;
use std::collections::HashMap;

/// Tokens that a sequence may generate before it yields to a tenant that runs nothing.
pub(super) const QUANTUM: usize = 128;
/// Budget of recomputed tokens per step between two yields: a small part of a step's cost.
pub(super) const RECOMPUTED_PER_STEP: usize = 256;
/// Number of steps that a tenant that never ran counts as having waited, so that it goes before tenants that have run
/// since.
pub(super) const HEAD_START: u64 = 4 * QUANTUM as u64;

/// State of yielding.
#[derive(Debug, Default)]
pub(super) struct Yielding {
    /// True if the next request did not fit the KV pool in the last plan.
    pub blocked: bool,
    /// No yield before this step, except those that cost only a slot.
    pub not_before: u64,
}

/// Number of slots of a group or tenant, and position of its youngest running sequence. Requests to be admitted next
/// have slots and do not run yet.
pub(super) type SlotShare = (usize, Option<usize>);

/// Slots by group and by tenant.
#[derive(Debug, Default)]
pub(super) struct Shares {
    pub groups: HashMap<u32, SlotShare>,
    tenants: HashMap<u64, SlotShare>,
}

impl Shares {
    /// Shares of the `running` sequences, oldest first, and the requests to be admitted `next`.
    pub fn of<'a, L: 'a>(
        running: impl Iterator<Item = &'a Sequence<L>>,
        next: impl Iterator<Item = &'a Sequence<L>>,
    ) -> Self {
        let mut shares = Self::default();
        let running = running.enumerate().map(|(place, seq)| (Some(place), seq));
        for (place, seq) in running.chain(next.map(|seq| (None, seq))) {
            let tenant = seq.request.tenant;
            for (count, youngest) in
                [shares.groups.entry(group(tenant)).or_default(), shares.tenants.entry(tenant).or_default()]
            {
                (*count, *youngest) = (*count + 1, place.or(*youngest));
            }
        }
        shares
    }

    pub fn group(&self, tenant: u64) -> usize {
        self.groups.get(&group(tenant)).map_or(0, |share| share.0)
    }

    pub fn tenant(&self, tenant: u64) -> usize {
        self.tenants.get(&tenant).map_or(0, |share| share.0)
    }

    /// The largest share of a tenant in this group. Among tenants with equally many sequences, the one with the
    /// youngest sequence.
    pub fn largest_of(&self, of: u32) -> SlotShare {
        let members = self.tenants.iter().filter(|(tenant, _)| group(**tenant) == of);
        members.map(|(_, share)| *share).max().unwrap_or_default()
    }
}
