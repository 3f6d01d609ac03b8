//! Tests of the budget's parts.

use super::*;
use futures_util::FutureExt;

const MIB: usize = 1 << 20;
const ONE: Tenant = tenant(1);
const OTHER: Tenant = tenant(2);

const fn tenant(id: u64) -> Tenant {
    Tenant { id, has_key: false }
}

/// True if `bytes` more bytes of a body can be read immediately.
fn reads(buffer: &mut BodyBuffer, bytes: usize) -> bool {
    let frame = vec![0; bytes];
    buffer.push(&frame).now_or_never().is_some()
}

#[tokio::test]
async fn large_bodies_leave_memory_for_small_ones_and_one_of_them_always_goes_on() {
    let budget = Arc::new(Budget::new(8 * MIB as u64));
    let mut bodies: Vec<BodyBuffer> = (0..8).map(|id| budget.buffer(tenant(id), 2 * MIB)).collect();
    let going: Vec<bool> = bodies.iter_mut().map(|body| reads(body, MIB)).collect();
    assert_eq!(going, [true, true, true, true, false, false, false, false], "3 of 8 MiB, and one body more");
    let mut small = budget.buffer(ONE, 2 * MIB);
    assert!(reads(&mut small, 60_000) && !reads(&mut small, 60_000));
    assert!(reads(&mut bodies[3], MIB), "the one without a share");
    assert!(!reads(&mut bodies[0], MIB));
    let exempt = bodies.remove(3);
    drop(exempt.finish());
    assert!(reads(&mut bodies[0], MIB), "the next one goes on");
    drop((bodies, small));
    assert_eq!(budget.large.free(), 3 << 10);
    assert_eq!((budget.small.free(), budget.exempt.free()), (1 << 10, 1));
}

#[tokio::test]
async fn small_bodies_that_have_come_in_part_do_not_block_each_other() {
    let budget = Arc::new(Budget::new(16 * MIB as u64));
    let half = SMALL_BODY / 2;
    let mut bodies: Vec<BodyBuffer> = (0..48).map(|_| budget.buffer(ONE, SMALL_BODY)).collect();
    assert!(bodies.iter_mut().all(|body| reads(body, half)), "three quarters of 2 MiB");
    assert!(reads(&mut bodies[0], half), "the one that goes on without a share");
    assert!(!reads(&mut bodies[1], half));
    drop(bodies.remove(0).finish());
    assert!(reads(&mut bodies[0], half), "the share that came back");
    assert!(reads(&mut bodies[1], half) && !reads(&mut bodies[2], half), "another one without a share");
    drop(bodies);
    assert_eq!((budget.small.free(), budget.exempt.free()), (2 << 10, 1));
}

#[tokio::test]
async fn a_client_with_large_bodies_leaves_memory_for_another_one_s() {
    let budget = Arc::new(Budget::new(16 * MIB as u64));
    let mut bodies: Vec<BodyBuffer> = (0..9).map(|_| budget.buffer(ONE, 2 * MIB)).collect();
    let going = bodies.iter_mut().filter_map(|body| reads(body, MIB).then_some(())).count();
    assert_eq!(going, 5, "three quarters of 6 MiB, and the one without a share");
    assert!(reads(&mut budget.buffer(OTHER, 2 * MIB), MIB));
}

#[tokio::test]
async fn parsed_bodies_of_one_client_do_not_keep_another_one_waiting() {
    let budget = Budget::new(256 * MIB as u64);
    let giant = budget.parse(ONE, 2 * MIB, 900_000).await.unwrap();
    let mut more: Vec<_> = (0..40).map(|_| Box::pin(budget.parse(ONE, 96 << 10, 20_000))).collect();
    let granted = more.iter_mut().filter_map(|body| body.now_or_never()).count();
    assert_eq!(granted, 0, "one client has all of the part for larger ones");
    let chats: Vec<_> = (0..20).map(|_| budget.parse(OTHER, 3 << 10, 200).now_or_never()).collect();
    assert!(chats.iter().all(Option::is_some), "small bodies have a part of their own");
    let mut large = Box::pin(budget.parse(OTHER, 96 << 10, 20_000));
    assert!(large.as_mut().now_or_never().is_none());
    drop(giant);
    assert!(large.as_mut().now_or_never().is_some(), "in turn, before most of those that came first");
    drop((more, chats));
}

#[tokio::test]
async fn shrinking_gives_memory_back() {
    let budget = Budget::new(256 * MIB as u64);
    let mut share = budget.parse(ONE, MIB, 100_000).await.unwrap();
    share.shrink(64 << 10);
    assert_eq!(budget.parsed.free(), (112 << 10) - 64);
    drop(share);
    assert_eq!(budget.parsed.free(), 112 << 10);
}

#[tokio::test]
async fn a_body_of_too_many_values_is_refused_by_name() {
    let budget = Budget::new(8 * MIB as u64);
    let error = budget.parse(ONE, 100_000, 50_000).await.unwrap_err().to_string();
    assert!(error.contains("has 50000 JSON values") && error.contains("at most 32768"), "{error}");
    assert!(error.contains("(--max-inflight-bytes is 8388608)"), "{error}");
    let share = budget.parse(ONE, 1000, 30_000).await.unwrap();
    assert!(budget.parse(ONE, 1000, 30_000).now_or_never().is_none(), "it waits");
    drop(share);
    assert!(budget.parse(ONE, 1000, 30_000).now_or_never().is_some());
}
