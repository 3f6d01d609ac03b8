//! Several engines behind one handle: routes, failures, fairness.

mod failures;
mod fairness;
mod world;

use pegainfer_core::engine::{GenerateRequest, RouteReason, SubmitError, TokenStream};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use world::{BLOCK, STEP_DEADLINE, Sizes, World, ready, request, text};

fn engines(streams: &[TokenStream]) -> Vec<usize> {
    streams.iter().map(|stream| stream.engine()).collect()
}

#[test]
fn idle_engines_take_turns_and_the_least_loaded_one_is_next() {
    let mut world = World::new(3);
    let streams: Vec<_> = (0..6).map(|i| world.submit(request(&text(i, 64), 4))).collect();
    assert_eq!(engines(&streams), [0, 1, 2, 0, 1, 2]);
    world.finish();
    drop(streams);
    // A long prompt keeps engine 0 busy.
    let long = world.submit(request(&text(10, 4000), 4));
    let others: Vec<_> = (20..23).map(|i| world.submit(request(&text(i, 64), 4))).collect();
    assert_eq!((long.engine(), engines(&others)), (0, vec![1, 2, 1]));
    world.finish();
    assert_eq!(world.handle.stats().generation_tokens, 10 * 4);
}

#[test]
fn a_conversation_stays_with_the_engine_that_has_its_prefix() {
    let mut world = World::new(2);
    for turns in 1..5 {
        for session in 0..8 {
            let mut stream = world.submit(request(&text(session, 200 * turns), 8));
            assert_eq!(stream.engine(), session as usize % 2, "turn {turns} of session {session}");
            world.finish();
            assert_eq!(ready(&mut stream), "attttttttfe");
        }
    }
    let hits: Vec<u64> = world.handle.engines().iter().map(|engine| engine.stats().prefix_hits).collect();
    assert!(hits.iter().all(|hits| *hits == 4 * (192 + 400 + 592)), "{hits:?}");
    let routes = world.handle.routes();
    let sum = |reason: RouteReason| routes.iter().map(|counts| counts[reason as usize]).sum::<u64>();
    assert_eq!([sum(RouteReason::Load), sum(RouteReason::Prefix)], [8 + 8, 16], "{routes:?}");
}

#[test]
fn a_second_request_follows_the_same_prompt_before_it_is_computed() {
    let mut world = World::with_sizes(&[Sizes { max_num_seqs: 64, kv_blocks: 2000, ..Sizes::default() }; 2]);
    let prompt = text(1, 1000);
    let first = world.submit(request(&prompt, 2));
    let second = world.submit(request(&[&prompt[..], &[5; 100]].concat(), 2));
    let other_salt = world.submit(GenerateRequest { cache_salt: 7, ..request(&prompt, 2) });
    let other = world.submit(request(&text(2, 1000), 2));
    assert_eq!(engines(&[first, second, other_salt, other]), [0, 0, 1, 1]);
    world.finish();
    // Nobody waits for a popular prompt longer than computing it again takes.
    let popular: Vec<_> = (0..100).map(|i| world.submit(request(&[&text(3, 640)[..], &[i; 16]].concat(), 2))).collect();
    let placed = engines(&popular);
    assert!(placed[..2].iter().all(|engine| *engine == placed[0]), "{placed:?}");
    assert!((30..70).contains(&placed.iter().filter(|engine| **engine == 0).count()), "{placed:?}");
    world.finish();
}

#[test]
fn choices_of_one_prompt_stay_together() {
    let mut world = World::new(3);
    for prompt in 0..3 {
        let first = world.submit(request(&text(prompt, 100), 4));
        let choice = || GenerateRequest { same_prompt_as: Some(first.id()), ..request(&text(prompt, 100), 4) };
        let others: Vec<_> = (0..20).map(|_| world.submit(choice())).collect();
        assert!(engines(&others).iter().all(|engine| *engine == prompt as usize));
    }
    assert!(world.handle.routes().iter().all(|counts| counts[RouteReason::Choice as usize] == 20));
    world.finish();
}

#[test]
fn a_request_may_name_its_engine() {
    let world = World::new(2);
    let pinned = |engine| world.handle.submit(GenerateRequest { engine: Some(engine), ..request(&[1; 40], 2) });
    let streams: Vec<_> = [1, 1, 0, 1].map(|engine| pinned(engine).unwrap()).into();
    assert_eq!(engines(&streams), [1, 1, 0, 1]);
    assert_eq!(pinned(2).unwrap_err(), SubmitError::NoSuchEngine { engine: 2, engines: 2 });
    let alone = World::new(1);
    let only = |engine| alone.handle.submit(GenerateRequest { engine: Some(engine), ..request(&[1], 2) });
    assert!(only(0).is_ok());
    assert_eq!(only(1).unwrap_err(), SubmitError::NoSuchEngine { engine: 1, engines: 1 });
}

#[test]
fn a_request_may_ask_for_a_cached_prompt() {
    for engines in [1, 2] {
        let mut world = World::new(engines);
        let only_if_cached = |prompt: &[u32]| GenerateRequest { only_if_cached: true, ..request(prompt, 2) };
        let refused = |world: &World, prompt: &[u32]| world.handle.submit(only_if_cached(prompt)).unwrap_err();
        let prompt = text(1, 4 * BLOCK + 3);
        assert_eq!(refused(&world, &prompt), SubmitError::NotCached { cached: 0, prompt: 4 * BLOCK + 3 });
        let first = world.submit(request(&prompt, 2));
        let engine = first.engine();
        world.finish();
        // The same prompt, a shorter one, and a prompt with another end of less than a block.
        for cached in [&prompt[..], &prompt[..4 * BLOCK], &[&prompt[..4 * BLOCK], &[5, 6, 7]].concat()] {
            assert_eq!(world.submit(only_if_cached(cached)).engine(), engine);
            world.finish();
        }
        let longer = [&prompt[..4 * BLOCK], &[5; 2 * BLOCK]].concat();
        assert_eq!(refused(&world, &longer), SubmitError::NotCached { cached: 4 * BLOCK, prompt: 6 * BLOCK });
        let other_salt = GenerateRequest { cache_salt: 7, ..only_if_cached(&prompt) };
        assert!(matches!(world.handle.submit(other_salt), Err(SubmitError::NotCached { cached: 0, .. })));
        // Prompts of one block at most are computed anyway.
        world.submit(only_if_cached(&text(2, BLOCK)));
        // A busy engine still gets what only its cache has.
        if engines == 2 {
            let busy: Vec<_> = (0..20)
                .map(|_| world.submit(GenerateRequest { engine: Some(engine), ..request(&text(3, 640), 2) }))
                .collect();
            assert_eq!(world.submit(only_if_cached(&prompt)).engine(), engine);
            let other = GenerateRequest { engine: Some(1 - engine), ..only_if_cached(&prompt) };
            assert!(matches!(world.handle.submit(other), Err(SubmitError::NotCached { .. })));
            drop(busy);
        }
        world.finish();
    }
}

#[test]
fn an_engine_that_can_never_hold_a_request_does_not_get_it() {
    let small = Sizes { kv_blocks: 10, ..Sizes::default() };
    let mut world = World::with_sizes(&[small, Sizes { kv_blocks: 20, ..small }]);
    assert_eq!(world.handle.limits().kv_blocks, 20, "limits are those of the largest");
    let streams: Vec<_> = (0..4).map(|i| world.submit(request(&text(i, 10 * BLOCK), 2))).collect();
    assert_eq!(engines(&streams), [1; 4]);
    let refused = world.handle.submit(request(&text(9, 20 * BLOCK), 2)).unwrap_err();
    assert!(matches!(refused, SubmitError::NeverFits { capacity: 320, .. }));
    world.finish();
    world.lose(1);
    let mut last = world.submit(request(&text(5, 10 * BLOCK), 2));
    world.turns(1, 3);
    assert_eq!(ready(&mut last), "axe", "no other engine can hold it");
    let refused = world.handle.submit(request(&text(6, 10 * BLOCK), 2)).unwrap_err();
    assert!(matches!(refused, SubmitError::NeverFits { capacity: 160, .. }));
}

#[test]
fn the_queue_is_bounded_over_all_engines() {
    let mut world = World::with_sizes(&[Sizes { max_queued: 5, ..Sizes::default() }; 2]);
    let streams: Vec<_> = (0..5).map(|i| world.submit(request(&text(i, 32), 2))).collect();
    let refused = world.handle.submit(request(&[1], 2)).unwrap_err();
    assert_eq!(refused, SubmitError::QueueFull { queued: 5 });
    world.finish();
    assert!(world.handle.submit(request(&[1], 2)).is_ok());
    drop(streams);
}

#[test]
fn a_stuck_engine_gets_no_requests_until_it_goes_on() {
    let mut world = World::new(2);
    let stuck = world.submit(request(&text(0, 64), 4));
    assert_eq!(stuck.engine(), 0);
    world.clocks[0].advance(2 * STEP_DEADLINE);
    let healthy = |world: &World| world.handle.engines().iter().map(|e| e.is_healthy()).collect::<Vec<_>>();
    assert_eq!((healthy(&world), world.handle.is_healthy()), (vec![false, true], true));
    let others: Vec<_> = (1..5).map(|i| world.submit(request(&text(i, 64), 4))).collect();
    assert_eq!(engines(&others), [1; 4]);
    world.clocks[1].advance(2 * STEP_DEADLINE);
    assert!(!world.handle.is_healthy() && world.handle.failure().is_none());
    assert!(world.handle.submit(request(&text(6, 64), 4)).is_ok(), "they may go on");
    world.finish();
    assert_eq!(healthy(&world), [true, true]);
    drop(stuck);
    let both: Vec<_> = (7..9).map(|i| world.submit(request(&text(i, 64), 4))).collect();
    assert_eq!(engines(&both).iter().sum::<usize>(), 1);
}

#[test]
fn a_reset_clears_the_caches_of_all_engines() {
    let mut world = World::new(2);
    let streams: Vec<_> = (0..4).map(|i| world.submit(request(&text(i, 64), 1))).collect();
    world.finish();
    drop(streams);
    let cached = |world: &World| -> Vec<usize> {
        let cached =
            |engine: usize| (0..4).map(|i| world.handle.engines()[engine].cached_prefix(0, &text(i, 64))).sum();
        vec![cached(0), cached(1)]
    };
    assert_eq!(cached(&world), [126, 126]);
    let handle = world.handle.clone();
    let mut reset = pin!(handle.reset_prefix_cache());
    let mut poll = || reset.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(poll().is_pending());
    world.turns(0, 1);
    assert!(poll().is_pending(), "engine 1 has its prefixes");
    world.turns(1, 1);
    assert_eq!(poll(), Poll::Ready(Ok(())));
    assert_eq!(cached(&world), [0, 0]);
}

#[test]
#[ignore = "measures time"]
fn a_decision_for_16k_tokens_takes_less_than_100_us() {
    let sizes = Sizes { kv_blocks: 10_000, step_tokens: 4096, ..Sizes::default() };
    let mut world = World::with_sizes(&[sizes; 2]);
    let prompt = text(1, 16_384);
    // Both engines have the prompt.
    let on = |engine| GenerateRequest { engine: Some(engine), ..request(&prompt, 1) };
    let _streams = [world.submit(on(0)), world.submit(on(1))];
    world.finish();
    let mut times: Vec<Duration> = (0..500)
        .map(|_| {
            let request = request(&prompt, 1);
            let start = std::time::Instant::now();
            let stream = world.submit(request);
            let time = start.elapsed();
            drop(stream);
            world.finish();
            time
        })
        .collect();
    times.sort_unstable();
    println!("p50 {:?}, p99 {:?}", times[250], times[495]);
    assert!(times[250] < Duration::from_micros(100));
}
