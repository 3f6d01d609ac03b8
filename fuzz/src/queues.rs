//! Property of the fair queue: permits are conserved, bounds hold, requests of a tenant keep their order, and no tenant
//! has two turns while another one waits for its first.

use pegainfer_server::fair_queue::{Entry, FairQueue, QueueFull, QueueLimits, Ticket};
use std::collections::{BTreeMap, VecDeque};

/// Number of tenants in an input.
const TENANTS: u8 = 5;

/// A waiting request in the model.
struct Waiter {
    ticket: Ticket,
    permits: usize,
}

/// Plain model of a queue, for comparison.
struct Model {
    limits: QueueLimits,
    /// Permits held by each request.
    held: Vec<(u8, usize)>,
    waiting: BTreeMap<u8, VecDeque<Waiter>>,
    /// Grants of the second tenant since the first one could have had one.
    passed: BTreeMap<(u8, u8), usize>,
}

/// Checks an input: four bytes of limits, then operations of two bytes.
pub fn check(data: &[u8]) {
    let [permits, per_tenant, waiting, waiting_per_tenant, operations @ ..] = data else { return };
    let limits = QueueLimits {
        permits: 1 + usize::from(permits % 16),
        permits_per_tenant: usize::from(per_tenant % 16),
        waiting: usize::from(waiting % 32),
        waiting_per_tenant: usize::from(waiting_per_tenant % 16),
    };
    let mut queue = FairQueue::new(limits, |tenant| u64::from(*tenant));
    let mut model = Model { limits, held: Vec::new(), waiting: BTreeMap::new(), passed: BTreeMap::new() };
    for operation in operations.chunks_exact(2) {
        model.apply(&mut queue, operation[0], usize::from(operation[1]));
        model.grant(&mut queue);
        model.verify(&queue);
    }
    // Giving back all permits at the end gives everybody a turn.
    while let Some((tenant, permits)) = model.held.pop() {
        queue.release(tenant, permits);
        model.grant(&mut queue);
        model.verify(&queue);
    }
    assert_eq!((queue.waiting(), queue.free()), (0, limits.permits), "somebody starves");
}

impl Model {
    fn apply(&mut self, queue: &mut FairQueue<u8>, operation: u8, choice: usize) {
        let tenant = operation / 4 % TENANTS;
        match operation % 4 {
            0 | 1 => self.enter(queue, tenant, choice % 24),
            2 => {
                let Some(list) = self.waiting.get_mut(&tenant).filter(|list| !list.is_empty()) else { return };
                let left = list.remove(choice % list.len()).expect("within the list");
                queue.leave(tenant, left.ticket);
                self.passed.retain(|(waits, _), _| *waits != tenant);
            }
            _ if self.held.is_empty() => {}
            _ => {
                let (tenant, permits) = self.held.swap_remove(choice % self.held.len());
                queue.release(tenant, permits);
            }
        }
    }

    fn enter(&mut self, queue: &mut FairQueue<u8>, tenant: u8, permits: usize) {
        let entry = queue.enter(tenant, permits);
        let permits = permits.min(self.limits.permits);
        let total: usize = self.waiting.values().map(VecDeque::len).sum();
        let list = self.waiting.entry(tenant).or_default();
        match entry {
            Ok(Entry::Granted) => {
                assert!(list.is_empty(), "past an earlier request of its tenant");
                self.granted(tenant, permits);
            }
            Ok(Entry::Waits(ticket)) => {
                assert!(list.len() < self.limits.waiting_per_tenant && total < self.limits.waiting);
                list.push_back(Waiter { ticket, permits });
            }
            Err(QueueFull::Tenant) => assert_eq!(list.len(), self.limits.waiting_per_tenant),
            Err(QueueFull::Total) => assert_eq!(total, self.limits.waiting),
        }
    }

    fn grant(&mut self, queue: &mut FairQueue<u8>) {
        while let Some((tenant, ticket, permits)) = queue.grant_next() {
            let first = self.waiting.get_mut(&tenant).and_then(VecDeque::pop_front).expect("it waits");
            assert_eq!((first.ticket, first.permits), (ticket, permits), "first come, first served");
            self.granted(tenant, permits);
        }
    }

    /// Counts a grant for the tenants that could have had it.
    fn granted(&mut self, tenant: u8, permits: usize) {
        let others = self.waiting.iter().filter(|(waits, _)| **waits != tenant);
        let heads: Vec<(u8, usize)> =
            others.filter_map(|(waits, list)| Some((*waits, list.front()?.permits))).collect();
        for (waits, wanted) in heads {
            if self.may_hold(waits, wanted) {
                let passed = self.passed.entry((waits, tenant)).or_default();
                *passed += 1;
                assert!(*passed <= 1, "tenant {tenant} has two turns while {waits} waits");
            } else {
                self.passed.remove(&(waits, tenant));
            }
        }
        self.passed.retain(|(waits, _), _| *waits != tenant);
        if permits > 0 {
            self.held.push((tenant, permits));
        }
    }

    fn held_by(&self, tenant: u8) -> usize {
        self.held.iter().filter(|held| held.0 == tenant).map(|held| held.1).sum()
    }

    fn may_hold(&self, tenant: u8, permits: usize) -> bool {
        let held = self.held_by(tenant);
        held == 0 || held + permits <= self.limits.permits_per_tenant
    }

    fn verify(&self, queue: &FairQueue<u8>) {
        let held: usize = self.held.iter().map(|held| held.1).sum();
        assert_eq!(queue.free() + held, self.limits.permits, "permits are conserved");
        assert_eq!(queue.waiting(), self.waiting.values().map(VecDeque::len).sum::<usize>());
        for tenant in 0..TENANTS {
            assert_eq!(queue.held(&tenant), self.held_by(tenant));
            let largest = self.held.iter().filter(|held| held.0 == tenant).map(|held| held.1).max().unwrap_or(0);
            assert!(
                self.held_by(tenant) <= self.limits.permits_per_tenant.max(largest),
                "one request may take more, alone"
            );
        }
    }
}

/// Inputs in which tenants wait, leave, and ask for more than they may hold.
pub fn seeds() -> Vec<Vec<u8>> {
    let enter = |tenant: u8, permits: u8| [4 * tenant, permits];
    let (leave, release) = (|tenant: u8, at: u8| [4 * tenant + 2, at], |at: u8| [3, at]);
    let one_permit: Vec<[u8; 2]> =
        (0..9).map(|i| enter(i % 3, 1)).chain([leave(1, 0)]).chain((0..9).map(|_| release(0))).collect();
    let memory: Vec<[u8; 2]> =
        (0..12).flat_map(|i| [enter(i % 4, 1 + i), release(i)]).chain([leave(2, 1), enter(2, 20)]).collect();
    let input = |limits: [u8; 4], operations: Vec<[u8; 2]>| [limits.to_vec(), operations.concat()].concat();
    vec![input([0, 1, 31, 15], one_permit), input([15, 11, 20, 8], memory)]
}
