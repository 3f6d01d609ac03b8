//! Tests of the output budget over simulated time.

use super::*;
use futures_util::FutureExt;

const MIB: usize = 1 << 20;

fn tenant(group: u64, member: u64) -> Tenant {
    Tenant { id: group << 32 | member, has_key: false }
}

#[tokio::test]
async fn a_tenant_may_have_all_until_another_one_wants_some() {
    let (budget, [one, other]) = (Arc::new(OutputBudget::new(8 * MIB as u64)), [1, 2].map(|group| tenant(group, 0)));
    let mut large = budget.response(one, usize::MAX).await.unwrap();
    assert_eq!(large.bytes, 8 * MIB as u64, "one response of any size");
    assert!(budget.response(one, 1).now_or_never().is_none(), "its next one waits");
    let mut growing = ResponseShare::default();
    let error = budget.grow(&mut growing, one, MIB).unwrap_err().to_string();
    assert!(error.contains("all of the 8388608 bytes") && error.contains("(--max-inflight-bytes)"), "{error}");
    budget.grow(&mut growing, other, 4 * MIB).unwrap();
    assert!(budget.grow(&mut growing, other, 1).is_err(), "half is its fair share");
    large.shrink(5 * MIB);
    assert!(budget.grow(&mut growing, other, 1).is_err(), "5 + 4 MiB");
    drop(large);
    budget.grow(&mut growing, other, 4 * MIB).unwrap();
    drop(growing);
    assert_eq!(budget.ledger().total(), 0);
}

#[tokio::test]
async fn a_response_gets_its_share_as_soon_as_memory_is_given_back() {
    let (budget, one) = (Arc::new(OutputBudget::new(8 * MIB as u64)), tenant(1, 0));
    let large = budget.response(one, 8 * MIB).await.unwrap();
    let mut waiting = std::pin::pin!(budget.response(one, 3 * MIB));
    assert!(waiting.as_mut().now_or_never().is_none());
    drop(large);
    assert_eq!(waiting.now_or_never().unwrap().unwrap().bytes, 3 * MIB as u64);
    budget.settle(&[Unread { tenant: one, bytes: 7 * MIB as u64 }]);
    let mut waiting = std::pin::pin!(budget.response(one, 3 * MIB));
    assert!(waiting.as_mut().now_or_never().is_none(), "unread output counts");
    budget.settle(&[]);
    assert!(waiting.now_or_never().is_some());
}

#[test]
fn connections_of_the_largest_holders_close_when_memory_is_short() {
    let budget = Arc::new(OutputBudget::new(100));
    let unread = |group, member, bytes| Unread { tenant: tenant(group, member), bytes };
    let many = [unread(1, 0, 30), unread(1, 1, 20), unread(1, 2, 40), unread(2, 0, 9)];
    assert_eq!(budget.settle(&many), [0; 0], "they fit");
    let mut share = ResponseShare::default();
    budget.grow(&mut share, tenant(3, 0), 20).unwrap();
    // The networks may hold 71, 9 and 20 bytes. In the first, 71 is a level of 25.5 for connections of 30 and 40.
    assert_eq!(budget.settle(&many), [2], "the largest one of the network that has the most");
    assert_eq!(budget.unread(), 59);
    drop(share);
    assert_eq!(budget.settle(&[many[0], many[1], many[3]]), [0; 0]);
}

#[test]
fn many_networks_within_their_shares_never_hold_more_than_twice_the_budget() {
    let budget = Arc::new(OutputBudget::new(1000));
    let mut shares = Vec::new();
    for network in 1..100 {
        let mut share = ResponseShare::default();
        while budget.grow(&mut share, tenant(network, 0), 10).is_ok() {}
        shares.push(share);
    }
    // Without the limit, each took its fair share among those before it: 1000 x (1 + 1/2 + 1/3 + …).
    assert!(budget.ledger().total() <= 2000, "{} bytes", budget.ledger().total());
    shares.remove(0);
    assert!(budget.grow(&mut shares[50], tenant(52, 0), 10).is_ok(), "who holds little goes on");
}

/// 256 connections of 32 networks accumulate output for an hour, each up to a response of 12 MB. A neighbour asks for a
/// response of 1 MB at each check, and reads it.
#[test]
fn an_hour_of_slow_readers_stays_within_the_budget_and_harms_no_neighbour() {
    const LIMIT: u64 = 256 << 20;
    const EACH: u64 = 12 << 20;
    let budget = Arc::new(OutputBudget::new(LIMIT));
    let mut piles = vec![0_u64; 256];
    let (mut highest, mut closed) = (0, 0);
    for look in 0..900_u64 {
        for (place, pile) in piles.iter_mut().enumerate() {
            // They begin one after another, and grow at different rates.
            if place as u64 <= look && *pile < EACH {
                *pile += 64_000 + 1552 * (place as u64 % 61);
            }
        }
        let mut share = ResponseShare::default();
        budget.grow(&mut share, tenant(99, 1), MIB).unwrap();
        let unread = |(place, &bytes): (usize, &u64)| Unread { tenant: tenant(place as u64 % 32, place as u64), bytes };
        let connections: Vec<Unread> = piles.iter().enumerate().map(unread).collect();
        for place in budget.settle(&connections) {
            assert!(piles[place] > 0);
            (piles[place], closed) = (0, closed + 1);
        }
        assert_eq!(piles.iter().sum::<u64>(), budget.unread());
        highest = highest.max(budget.unread() + MIB as u64);
    }
    assert!(highest <= LIMIT && highest > LIMIT / 2, "{highest} bytes");
    assert!(closed > 1000, "{closed} connections closed");
}
