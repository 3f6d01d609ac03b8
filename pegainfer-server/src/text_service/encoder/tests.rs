//! Order of work, turns of large work, panics.

use super::*;
use crate::testing;
use std::time::Duration;
use tokio::time::timeout;

const ONE: Tenant = Tenant { id: 1, has_key: false };
const OTHER: Tenant = Tenant { id: 2, has_key: false };

#[tokio::test]
async fn texts_are_encoded_in_their_order() {
    let encoder = Encoder::start(Arc::new(testing::tokenizer())).unwrap();
    let texts: Vec<String> = (0..50).map(|i| format!("text number {i}")).collect();
    let expected: Vec<_> = texts.iter().map(|text| encoder.tokenizer.encode(text, true).unwrap()).collect();
    assert_eq!(encoder.work(ONE, 1, encode(texts, true)).await.unwrap().unwrap(), expected);
}

#[tokio::test]
async fn large_work_leaves_the_threads_to_others_and_never_begins_for_nobody() {
    let encoder = Encoder::start(Arc::new(testing::tokenizer())).unwrap();
    let (release, held) = std::sync::mpsc::channel::<()>();
    let long = encoder.work(ONE, LARGE + 1, move |_, _| held.recv().is_ok());
    let abandoned = encoder.work(ONE, LARGE + 1, |_, _| panic!("nobody waits"));
    let mut long = std::pin::pin!(long);
    assert!(timeout(Duration::ZERO, long.as_mut()).await.is_err());
    drop(abandoned);
    let text = vec!["Once upon a time".to_string()];
    assert_eq!(encoder.work(ONE, 1, encode(text, true)).await.unwrap().unwrap().len(), 1);
    let next = encoder.work(ONE, LARGE + 1, |_, cancel| cancel.is_cancelled());
    release.send(()).unwrap();
    assert_eq!((long.await.unwrap(), next.await.unwrap()), (true, false));
}

#[tokio::test]
async fn tenants_take_turns_on_the_threads() {
    let encoder = Encoder::start(Arc::new(testing::tokenizer())).unwrap();
    let (release, held) = crossbeam_channel::bounded::<()>(0);
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let turns = encoder.threads.free();
    let mut blocked: Vec<_> = (0..turns)
        .map(|_| {
            let held = held.clone();
            Box::pin(encoder.work(ONE, 1, move |_, _| held.recv().is_err()))
        })
        .collect();
    for work in &mut blocked {
        assert!(timeout(Duration::ZERO, work.as_mut()).await.is_err());
    }
    let waiting = std::iter::repeat_n(ONE, 3 * turns).chain([OTHER; 3]).map(|tenant| {
        let order = order.clone();
        encoder.work(tenant, 1, move |_, _| order.lock().unwrap().push(tenant.id))
    });
    let mut waiting: Vec<_> = waiting.map(Box::pin).collect();
    for work in &mut waiting {
        assert!(timeout(Duration::ZERO, work.as_mut()).await.is_err());
    }
    assert_eq!(encoder.threads.waiting(), 3 * turns + 3);
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
    let encoder = Encoder::start(Arc::new(testing::tokenizer())).unwrap();
    let huge = encoder.large_turn(ONE, 8 << 20).await.unwrap();
    let large = encoder.large_turn(ONE, LARGE + 1).await.unwrap();
    let mut more = Box::pin(encoder.large_turn(ONE, LARGE + 1));
    assert!(timeout(Duration::ZERO, more.as_mut()).await.is_err(), "one at a time");
    assert!(timeout(Duration::ZERO, encoder.large_turn(OTHER, LARGE + 1)).await.is_ok());
    drop((huge, large));
    assert!(timeout(Duration::from_secs(1), more).await.is_ok());
}

#[tokio::test]
async fn a_panic_ends_no_thread() {
    let encoder = Encoder::start(Arc::new(testing::tokenizer())).unwrap();
    for _ in 0..2 * MAX_THREADS {
        let result = encoder.work(ONE, 1, |_, _| panic!("a bug")).await;
        assert!(matches!(result, Err::<(), _>(EncoderError::Panicked)));
    }
    assert_eq!(encoder.run(|_| 5), 5);
}
