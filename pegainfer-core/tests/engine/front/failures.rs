//! Engines that are lost.

use super::world::{Sizes, World, ready, request, text};
use pegainfer_core::engine::{GenerateRequest, RouteReason, SubmitError, TokenStream};

/// Runs the world and collects the letters of a stream until its end.
fn rest(world: &mut World, stream: &mut TokenStream) -> String {
    let mut letters = String::new();
    for _ in 0..1000 {
        letters += &ready(stream);
        if letters.ends_with('e') {
            return letters;
        }
        world.turn();
    }
    panic!("the stream does not end after {letters}");
}

#[test]
fn requests_without_a_token_go_to_another_engine_and_others_fail() {
    let mut world = World::with_sizes(&[Sizes { kv_blocks: 2000, ..Sizes::default() }; 2]);
    // Eight run on engine 0; two more wait for their slots, one of them named this engine.
    let on = |engine, i| GenerateRequest { engine: Some(engine), ..request(&text(i, 40), 50) };
    let mut running: Vec<_> = (0..8).map(|i| world.submit(on(0, i))).collect();
    let mut pinned = world.submit(on(0, 8));
    let mut other = world.submit(on(1, 9));
    let busy = world.submit(request(&text(10, 25_000), 2));
    assert_eq!(busy.engine(), 1);
    let mut waiting = world.submit(request(&text(11, 40), 5));
    assert_eq!(waiting.engine(), 0);
    drop(busy);
    world.turns(0, 10);
    running.iter_mut().for_each(|stream| assert!(ready(stream).starts_with("at")));
    assert_eq!(ready(&mut waiting), "");
    let backlog = waiting.backlog();
    world.lose(0);
    world.turns(0, 3);
    running.iter_mut().for_each(|stream| assert_eq!(ready(stream), "xe"));
    assert_eq!(ready(&mut pinned), "xe");
    assert_eq!(rest(&mut world, &mut waiting), "atttttfe", "its client notices nothing");
    assert_eq!((waiting.engine(), backlog.bytes()), (1, 0));
    assert_eq!(world.handle.routes()[1][RouteReason::Moved as usize], 1);
    assert!(rest(&mut world, &mut other).ends_with("tfe"));
    let engines = world.handle.engines();
    assert!(world.handle.is_healthy() && world.handle.failure().is_none());
    assert_eq!(engines.iter().map(|engine| engine.is_healthy()).collect::<Vec<_>>(), [false, true]);
    assert!(engines[0].failure().unwrap().ends_with("the device is gone"));
    assert_eq!((engines[0].stats().running, engines[0].stats().waiting), (0, 0));
    let refused = world.handle.submit(on(0, 12)).unwrap_err();
    assert_eq!(refused, SubmitError::EngineLost { engine: 0 });
    let later: Vec<_> = (0..4).map(|i| world.submit(request(&text(i, 40), 5))).collect();
    assert!(later.iter().all(|stream| stream.engine() == 1), "also those whose prefix was on engine 0");
    world.finish();
}

#[test]
fn a_request_whose_prompt_was_being_computed_moves_once() {
    let mut world = World::new(3);
    let mut stream = world.submit(request(&text(0, 2000), 3));
    world.turns(0, 2);
    assert_eq!(ready(&mut stream), "a");
    world.lose(0);
    world.turns(0, 3);
    assert_eq!(ready(&mut stream), "", "a second admission is not shown");
    assert_eq!(stream.engine(), 1);
    world.turns(1, 2);
    world.lose(1);
    world.turns(1, 3);
    assert_eq!(ready(&mut stream), "xe", "it may be the cause");
    assert!(world.handle.is_healthy());
    let mut next = world.submit(request(&text(1, 40), 2));
    assert_eq!(rest(&mut world, &mut next), "attfe");
}

#[test]
fn a_request_that_only_waited_moves_as_often_as_engines_are_lost() {
    let mut world = World::new(3);
    let mut stream = world.submit(request(&text(0, 40), 2));
    for engine in 0..2 {
        assert_eq!(stream.engine(), engine);
        world.lose(engine);
        // The request never runs there: its engine fails with a step of another one.
        let other = world.submit(GenerateRequest { engine: Some(engine), priority: -1, ..request(&text(5, 600), 2) });
        world.turns(engine, 3);
        assert_eq!(ready(&mut stream), "");
        drop(other);
    }
    assert_eq!(rest(&mut world, &mut stream), "attfe");
}

#[test]
fn the_last_engine_that_is_lost_ends_everything() {
    let mut world = World::new(2);
    let mut streams = [world.submit(request(&text(0, 40), 9)), world.submit(request(&text(1, 40), 9))];
    (0..2).for_each(|engine| world.lose(engine));
    (0..2).for_each(|engine| world.turns(engine, 3));
    for stream in &mut streams {
        assert!(rest(&mut world, stream).ends_with("xe"));
    }
    assert!(!world.handle.is_healthy() && world.handle.failure().is_some());
    assert_eq!(world.handle.submit(request(&[1], 1)).unwrap_err(), SubmitError::EngineStopped);
}

#[test]
fn a_dropped_stream_is_not_submitted_again() {
    let mut world = World::new(2);
    let stream = world.submit(request(&text(0, 40), 9));
    world.lose(0);
    world.turns(0, 3);
    drop(stream);
    assert_eq!(world.handle.engines()[1].stats().waiting, 0);
}

#[test]
fn an_engine_that_panics_leaves_no_requests_behind() {
    let mut world = World::with_sizes(&[Sizes { max_queued: 3, ..Sizes::default() }; 2]);
    let mut streams: Vec<_> = (0..3).map(|i| world.submit(request(&text(i, 40), 9))).collect();
    world.turns(0, 1);
    // The loop's thread unwinds, and drops it.
    world.unwind(0);
    let stats = world.handle.engines()[0].stats();
    assert_eq!((stats.running, stats.waiting), (0, 0));
    assert!(world.handle.submit(request(&text(4, 40), 2)).is_ok(), "the queue has capacity again");
    assert_eq!(rest(&mut world, &mut streams[1]), "atttttttttfe");
    assert!(world.handle.is_healthy());
}
