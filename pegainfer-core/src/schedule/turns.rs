//! Fair queueing: the order in which the waiting requests of several tenants are admitted.
//!
//! Start-time fair queueing with requests of equal cost (Goyal, Vin and Cheng, SIGCOMM 1996), on two levels: groups of
//! tenants take turns, and within a group its tenants do. A request gets a turn of its group when it arrives: the
//! current turn, or the one after its group's latest request, whichever is later. Requests are admitted by turn, so a
//! group that queues a hundred requests delays another group's first request by one place. The turns of a group go to
//! its requests in the order of their rounds, which are the turns of tenants within the group ([`order_group`]). Later
//! requests of other groups never add turns before a request; within a group, only the first request of another tenant
//! does. Every request is therefore admitted eventually.

use super::sequence::Sequence;
use std::collections::{BTreeMap, HashMap, VecDeque};

/// The group of a tenant: the upper half of its number. A server puts clients that may be the same person into one
/// group. Numbers below 2^32 are tenants of the same group.
pub(crate) fn group(tenant: u64) -> u32 {
    (tenant >> 32) as u32
}

/// Turns of the waiting requests of each priority.
#[derive(Debug, Default)]
pub(super) struct Turns(BTreeMap<i32, Lane>);

/// Turns of one priority.
#[derive(Debug, Default)]
struct Lane {
    /// The current turn.
    now: u64,
    /// Turn of each group's next request. A group with a turn up to `now` may be missing.
    next: HashMap<u32, u64>,
}

/// Number of groups that a lane remembers before it drops those without a request in a later turn.
const MIN_REMEMBERED: usize = 64;

impl Turns {
    /// Turn of a new request.
    pub fn arrive(&mut self, priority: i32, group: u32) -> u64 {
        let Lane { now, next } = self.0.entry(priority).or_default();
        if next.len() >= MIN_REMEMBERED && next.len().is_power_of_two() {
            next.retain(|_, turn| *turn > *now);
        }
        let next = next.entry(group).or_insert(*now);
        let turn = (*next).max(*now);
        *next = turn + 1;
        turn
    }

    /// Records that a request of this turn was admitted.
    pub fn admitted(&mut self, priority: i32, turn: u64) {
        let lane = self.0.entry(priority).or_default();
        lane.now = lane.now.max(turn);
    }

    /// Removes all requests.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

/// Queues of waiting requests.
type Waiting<L> = VecDeque<Box<Sequence<L>>>;

/// Queues a request by the turn of its group, and orders the group.
pub(super) fn enter<L: Default>(waiting: &mut Waiting<L>, mut seq: Box<Sequence<L>>) {
    let (priority, tenant) = (seq.request.priority, seq.request.tenant);
    let mut rounds = [None; 2];
    for other in waiting.iter().filter(|other| is_neighbour(other, priority, group(tenant))) {
        let round = other.round;
        rounds[0] = Some(rounds[0].map_or(round, |first: u64| first.min(round)));
        if other.request.tenant == tenant {
            rounds[1] = Some(rounds[1].map_or(round, |last: u64| last.max(round)));
        }
    }
    let [served, latest] = rounds;
    // A request that has started goes before other requests of its tenant.
    let own = if seq.has_yielded { None } else { latest.map(|latest| latest + 1) };
    seq.round = own.or(served).unwrap_or(0);
    let order = (priority, seq.turn);
    let later = |seq: &Sequence<L>| seq.waits_for_turn() && (seq.request.priority, seq.turn) > order;
    let at = waiting.iter().position(|seq| later(seq)).unwrap_or(waiting.len());
    waiting.insert(at, seq);
    order_group(waiting, priority, group(tenant));
}

/// Gives the turns of a group to its requests in the order of their rounds; requests of the same round keep their
/// order.
fn order_group<L: Default>(waiting: &mut Waiting<L>, priority: i32, group: u32) {
    let places = waiting.iter().enumerate().filter(|(_, seq)| is_neighbour(seq, priority, group));
    let places: Vec<usize> = places.map(|(place, _)| place).collect();
    let turns: Vec<u64> = places.iter().map(|&place| waiting[place].turn).collect();
    // Only the newest request can be out of order.
    for sorted in 1..places.len() {
        let mut at = sorted;
        while at > 0 && waiting[places[at - 1]].round > waiting[places[at]].round {
            waiting.swap(places[at - 1], places[at]);
            at -= 1;
        }
    }
    for (place, turn) in places.into_iter().zip(turns) {
        waiting[place].turn = turn;
    }
}

/// True if a request of this priority and group waits for a turn.
fn is_neighbour<L: Default>(seq: &Sequence<L>, priority: i32, of: u32) -> bool {
    seq.waits_for_turn() && seq.request.priority == priority && group(seq.request.tenant) == of
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{GenerateRequest, RequestId};
    use crate::kv::BlockPool;
    use std::sync::Arc;

    #[test]
    fn a_group_with_many_requests_delays_others_by_one_place() {
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
    fn groups_that_wait_for_nothing_are_forgotten() {
        let mut turns = Turns::default();
        for group in 0..100_000 {
            let turn = turns.arrive(0, group);
            turns.admitted(0, turn + 1);
        }
        assert!(turns.0[&0].next.len() <= MIN_REMEMBERED);
    }

    /// Queues requests of these (group, member) pairs, numbered from 0; returns their order.
    fn order(tenants: &[(u64, u64)]) -> Vec<u64> {
        let (mut turns, mut waiting, pool) = (Turns::default(), Waiting::<()>::new(), BlockPool::new(1, 16));
        for (id, (of, member)) in tenants.iter().enumerate() {
            let request = GenerateRequest { tenant: of << 32 | member, ..GenerateRequest::greedy(vec![1], 1) };
            let turn = turns.arrive(0, *of as u32);
            enter(
                &mut waiting,
                Box::new(Sequence::new(RequestId(id as u64), request, turn, &pool, None, &Arc::default())),
            );
        }
        assert!(waiting.iter().map(|seq| seq.turn).is_sorted());
        waiting.iter().map(|seq| seq.id.0).collect()
    }

    #[test]
    fn groups_take_turns_and_their_tenants_within_them() {
        assert_eq!(order(&[(1, 0), (1, 0), (1, 0), (2, 0), (2, 0)]), [0, 3, 1, 4, 2]);
        assert_eq!(order(&[(1, 0), (1, 0), (1, 0), (1, 1), (1, 1)]), [0, 3, 1, 4, 2], "a group alone");
        let many: Vec<(u64, u64)> = (0..50).map(|member| (1, member)).chain([(2, 0), (2, 0)]).collect();
        assert_eq!(order(&many)[..4], [0, 50, 1, 51], "many tenants of a group are one of two");
        assert_eq!(order(&[(1, 0), (1, 0), (2, 0), (1, 1)]), [0, 2, 3, 1], "a tenant takes the place of its group");
    }
}
