//! Order of work, turns of large work, panics.

use super::*;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

const ONE: Tenant = Tenant { id: 1, has_key: false };
const OTHER: Tenant = Tenant { id: 2, has_key: false };

#[tokio::test]
async fn large_work_leaves_the_threads_to_others_and_never_begins_for_nobody() {
    let workers = Workers::default();
    let (release, held) = std::sync::mpsc::channel::<()>();
    let long = workers.work(ONE, LARGE + 1, move |_| held.recv().is_ok());
    let abandoned = workers.work(ONE, LARGE + 1, |_| panic!("nobody waits"));
    let mut long = std::pin::pin!(long);
    assert!(timeout(Duration::ZERO, long.as_mut()).await.is_err());
    drop(abandoned);
    assert_eq!(workers.work(ONE, 1, |_| 1).await.unwrap(), 1);
    let next = workers.work(ONE, LARGE + 1, |cancel| cancel.is_cancelled());
    release.send(()).unwrap();
    assert_eq!((long.await.unwrap(), next.await.unwrap()), (true, false));
}

#[tokio::test]
async fn tenants_take_turns_on_the_threads() {
    let workers = Workers::default();
    let (release, held) = crossbeam_channel::bounded::<()>(0);
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let turns = workers.shared.free();
    let mut blocked: Vec<_> = (0..turns)
        .map(|_| {
            let held = held.clone();
            Box::pin(workers.work(ONE, 1, move |_| held.recv().is_err()))
        })
        .collect();
    for work in &mut blocked {
        assert!(timeout(Duration::ZERO, work.as_mut()).await.is_err());
    }
    let waiting = std::iter::repeat_n(ONE, 3 * turns).chain([OTHER; 3]).map(|tenant| {
        let order = order.clone();
        workers.work(tenant, 1, move |_| order.lock().unwrap().push(tenant.id))
    });
    let mut waiting: Vec<_> = waiting.map(Box::pin).collect();
    for work in &mut waiting {
        assert!(timeout(Duration::ZERO, work.as_mut()).await.is_err());
    }
    assert_eq!(workers.shared.waiting(), 3 * turns + 3);
    drop(release);
    assert!(futures_util::future::join_all(waiting).await.iter().all(Result::is_ok));
    drop(blocked);
    let order = order.lock().unwrap();
    let last = order.iter().rposition(|id| *id == OTHER.id).unwrap();
    // Two threads may finish in either order.
    assert!(last <= 6 + turns, "{order:?}");
}

#[tokio::test]
async fn one_client_s_large_work_leaves_a_turn_to_another_one() {
    let workers = Workers::default();
    let huge = workers.large_turn(ONE, 8 << 20).await.unwrap();
    let large = workers.large_turn(ONE, LARGE + 1).await.unwrap();
    let mut more = Box::pin(workers.large_turn(ONE, LARGE + 1));
    assert!(timeout(Duration::ZERO, more.as_mut()).await.is_err(), "one at a time");
    assert!(timeout(Duration::ZERO, workers.large_turn(OTHER, LARGE + 1)).await.is_ok());
    drop((huge, large));
    assert!(timeout(Duration::from_secs(1), more).await.is_ok());
}
