//! Fair queueing: the order in which the waiting requests of several tenants are admitted.
//!
//! Start-time fair queueing with requests of equal cost (Goyal, Vin and Cheng, SIGCOMM 1996). Each request gets a turn when
//! it arrives: the turn that is being served, or the one after its tenant's latest request, whichever is later. Requests
//! are admitted by turn, so a tenant that queues a hundred requests delays another tenant's first one by one place. A turn
//! never changes, so every request is admitted at some time.

use std::collections::{BTreeMap, HashMap};

/// Turns of the waiting requests, for each priority on its own.
#[derive(Debug, Default)]
pub(super) struct Turns(BTreeMap<i32, Lane>);

/// Turns of one priority.
#[derive(Debug, Default)]
struct Lane {
    /// The turn that is being served.
    now: u64,
    /// By tenant: the turn of its next request. A tenant whose turn is not later than `now` need not be here.
    next: HashMap<u64, u64>,
}

/// Tenants that a lane remembers before it forgets those that have no request in a later turn.
const MIN_REMEMBERED: usize = 64;

impl Turns {
    /// The turn of a request that arrives.
    pub fn arrive(&mut self, priority: i32, tenant: u64) -> u64 {
        let Lane { now, next } = self.0.entry(priority).or_default();
        if next.len() >= MIN_REMEMBERED && next.len().is_power_of_two() {
            next.retain(|_, turn| *turn > *now);
        }
        let next = next.entry(tenant).or_insert(*now);
        let turn = (*next).max(*now);
        *next = turn + 1;
        turn
    }

    /// A request of this turn was admitted.
    pub fn admitted(&mut self, priority: i32, turn: u64) {
        let lane = self.0.entry(priority).or_default();
        lane.now = lane.now.max(turn);
    }

    /// No request waits.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_with_many_requests_delays_others_by_one_place() {
        let mut turns = Turns::default();
        let many: Vec<u64> = (0..100).map(|_| turns.arrive(0, 1)).collect();
        assert_eq!(many, Vec::from_iter(0..100));
        assert_eq!((turns.arrive(0, 2), turns.arrive(0, 2)), (0, 1));
        turns.admitted(0, 40);
        assert_eq!(turns.arrive(0, 3), 40, "nobody goes before what is being served");
        assert_eq!(turns.arrive(0, 1), 100);
        assert_eq!(turns.arrive(-1, 1), 0, "another priority");
    }

    #[test]
    fn tenants_that_wait_for_nothing_are_forgotten() {
        let mut turns = Turns::default();
        for tenant in 0..100_000 {
            let turn = turns.arrive(0, tenant);
            turns.admitted(0, turn + 1);
        }
        assert!(turns.0[&0].next.len() <= MIN_REMEMBERED);
    }
}
