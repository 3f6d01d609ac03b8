//! Order, bounds and conservation of permits.

use super::*;
use futures_util::FutureExt;
use pegainfer_testing::{self as testing, Rng};
use std::collections::VecDeque;
use tokio::task::unconstrained;

const LIMITS: QueueLimits = QueueLimits { permits: 4, permits_per_tenant: 3, waiting: 12, waiting_per_tenant: 6 };

fn tenant(id: u64) -> Tenant {
    Tenant { id, has_key: false }
}

fn slots(limits: QueueLimits) -> Slots {
    Slots::new(limits, MAX_WAIT)
}

/// Puts each tenant in its own group.
fn own_group(tenant: &u8) -> u64 {
    u64::from(*tenant)
}

/// Grants permits until nobody is next, and returns the tenants in order.
fn granted(queue: &mut FairQueue<u8>) -> Vec<u8> {
    std::iter::from_fn(|| queue.grant_next()).map(|(tenant, ..)| tenant).collect()
}

#[test]
fn tenants_take_turns_and_their_own_requests_keep_their_order() {
    let mut queue = FairQueue::new(QueueLimits { permits: 1, permits_per_tenant: 1, ..LIMITS }, own_group);
    assert_eq!(queue.enter(1, 1), Ok(Entry::Granted));
    let tickets: Vec<(u8, Entry)> =
        [1, 1, 1, 1, 2, 2, 3].map(|tenant| (tenant, queue.enter(tenant, 1).unwrap())).into();
    let (mut order, mut holder) = (Vec::new(), 1);
    loop {
        queue.release(holder, 1);
        let Some((tenant, ticket, 1)) = queue.grant_next() else { break };
        assert_eq!(queue.grant_next(), None, "one permit");
        order.push((tenant, Entry::Waits(ticket)));
        holder = tenant;
    }
    assert_eq!(order.iter().map(|(tenant, _)| *tenant).collect::<Vec<_>>(), [1, 2, 3, 1, 2, 1, 1]);
    for tenant in 1..=3 {
        let of = |list: &[(u8, Entry)]| list.iter().filter(|entry| entry.0 == tenant).copied().collect::<Vec<_>>();
        assert_eq!(of(&order), of(&tickets), "first come, first served");
    }
}

#[test]
fn many_tenants_of_one_group_have_one_turn_of_the_groups() {
    let limits = QueueLimits { permits: 1, permits_per_tenant: 1, ..LIMITS };
    let mut queue = FairQueue::new(limits, |(group, _): &(u8, u8)| u64::from(*group));
    assert_eq!(queue.enter((1, 0), 1), Ok(Entry::Granted));
    for tenant in [(1, 1), (1, 2), (1, 3), (1, 1), (2, 1), (2, 1), (3, 1)] {
        assert!(matches!(queue.enter(tenant, 1), Ok(Entry::Waits(_))));
    }
    let (mut order, mut holder) = (Vec::new(), (1, 0));
    loop {
        queue.release(holder, 1);
        let Some((tenant, ..)) = queue.grant_next() else { break };
        order.push(tenant);
        holder = tenant;
    }
    assert_eq!(order, [(1, 1), (2, 1), (3, 1), (1, 2), (2, 1), (1, 3), (1, 1)]);
}

#[test]
fn a_tenant_leaves_permits_to_the_others_and_its_queue_is_bounded() {
    let mut queue = FairQueue::new(LIMITS, own_group);
    let entries: Vec<_> = (0..10).map(|_| queue.enter(1, 1)).collect();
    assert!(entries[..3].iter().all(|entry| *entry == Ok(Entry::Granted)));
    assert!(entries[3..9].iter().all(|entry| matches!(entry, Ok(Entry::Waits(_)))), "{entries:?}");
    assert_eq!(entries[9], Err(QueueFull::Tenant));
    assert_eq!(queue.enter(2, 1), Ok(Entry::Granted), "past those who have their share");
    let others: Vec<_> = (0..7).map(|i| queue.enter(3 + i / 4, 1)).collect();
    assert_eq!((others[5].is_ok(), others[6]), (true, Err(QueueFull::Total)));
    queue.release(1, 1);
    assert_eq!(granted(&mut queue), [1]);
    queue.release(2, 1);
    assert_eq!(granted(&mut queue), [3], "tenant 1 has its share again");
}

#[test]
fn many_permits_are_granted_to_one_that_holds_none_and_nobody_overtakes_it() {
    let mut queue = FairQueue::new(LIMITS, own_group);
    assert_eq!(queue.enter(1, 1), Ok(Entry::Granted));
    assert!(matches!(queue.enter(2, 9), Ok(Entry::Waits(_))), "more than there are are all of them");
    assert!(matches!(queue.enter(3, 1), Ok(Entry::Waits(_))), "three are free, but tenant 2 is next");
    assert!(granted(&mut queue).is_empty());
    queue.release(1, 1);
    assert_eq!(granted(&mut queue), [2]);
    assert_eq!((queue.free(), queue.held(&2)), (0, 4));
}

#[tokio::test]
async fn a_dropped_future_leaves_no_trace() {
    let slots = slots(QueueLimits { permits: 1, permits_per_tenant: 1, ..LIMITS });
    let permit = slots.acquire(tenant(1), 1).await.unwrap();
    let mut waiting: Vec<_> = (0..3).map(|_| Box::pin(slots.acquire(tenant(2), 1))).collect();
    assert!(waiting.iter_mut().all(|future| future.now_or_never().is_none()));
    drop(waiting.remove(0));
    assert_eq!(slots.waiting(), 2);
    drop(permit);
    // The first waiter has its permit, and is not polled again.
    assert_eq!((slots.waiting(), slots.free()), (1, 0));
    drop(waiting.remove(0));
    drop(waiting.remove(0).now_or_never().unwrap().unwrap());
    assert_eq!((slots.waiting(), slots.free()), (0, 1));
}

#[tokio::test]
async fn a_wait_ends_and_a_refusal_says_why() {
    let limits = QueueLimits { permits: 1, permits_per_tenant: 1, waiting: 2, waiting_per_tenant: 1 };
    let slots = Slots::new(limits, Duration::from_millis(20));
    let permit = slots.acquire(tenant(1), 1).await.unwrap();
    let mut waits = Box::pin(slots.acquire(tenant(1), 1));
    assert!(waits.as_mut().now_or_never().is_none());
    let refused = slots.acquire(tenant(1), 1).await.unwrap_err().to_string();
    assert_eq!(refused, "1 other requests of this client are already waiting");
    assert_eq!(waits.await.unwrap_err().to_string(), "its turn did not come within 0.02 s");
    assert_eq!(slots.waiting(), 0);
    drop(permit);
    assert!(slots.try_acquire(tenant(2), 1).is_some() && slots.free() == 1);
}

#[tokio::test]
async fn permits_are_conserved_over_random_schedules() {
    let mut rng = Rng(testing::seed());
    for _ in 0..200 {
        let limits = QueueLimits {
            permits: 1 + rng.below(6),
            permits_per_tenant: 1 + rng.below(4),
            waiting: 1 + rng.below(12),
            waiting_per_tenant: 1 + rng.below(6),
        };
        let slots = slots(limits);
        let (mut held, mut waiting) = (Vec::new(), VecDeque::new());
        for _ in 0..100 {
            let (tenant, count) = (tenant(rng.below(4) as u64), rng.below(limits.permits + 2));
            match rng.below(5) {
                0 | 1 => waiting.push_back(Box::pin({
                    let slots = slots.clone();
                    async move { slots.acquire(tenant, count).await }
                })),
                2 if !waiting.is_empty() => drop(waiting.remove(rng.below(waiting.len()))),
                3 if !held.is_empty() => drop(held.swap_remove(rng.below(held.len()))),
                _ => held.extend(slots.try_acquire(tenant, count)),
            }
            for _ in 0..waiting.len() {
                let Some(mut future) = waiting.pop_front() else { break };
                // Without it, a completed future may have to wait until the test has yielded.
                match unconstrained(future.as_mut()).now_or_never() {
                    None => waiting.push_back(future),
                    Some(done) => held.extend(done.ok()),
                }
            }
            let taken: usize = held.iter().map(Permits::count).sum();
            assert_eq!(taken + slots.free(), limits.permits, "{limits:?}");
            assert_eq!(slots.waiting(), waiting.len(), "{limits:?}");
            assert!(slots.waiting() <= limits.waiting, "{limits:?}");
        }
        drop((held, waiting));
        assert_eq!((slots.free(), slots.waiting()), (limits.permits, 0), "{limits:?}");
    }
}
