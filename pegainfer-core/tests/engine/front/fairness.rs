//! Fairness between tenants over all engines.

use super::world::{Sizes, World, ready, request, text};
use pegainfer_core::engine::{GenerateRequest, TokenStream};
use std::time::Duration;

fn of(tenant: u64, request: GenerateRequest) -> GenerateRequest {
    GenerateRequest { tenant: tenant << 32, ..request }
}

#[test]
fn a_flood_of_one_tenant_delays_others_by_one_turn_on_any_engine() {
    let mut world = World::new(2);
    let _flood: Vec<_> = (0..200).map(|i| world.submit(of(1, request(&text(i, 300), 4)))).collect();
    (0..40).for_each(|_| world.turn());
    for i in 0..10 {
        let mut stream = world.submit(of(2, request(&text(300 + i, 300), 1)));
        let turns = (1..200).find(|_| {
            world.turn();
            ready(&mut stream).contains('t')
        });
        assert!(turns.unwrap() < 30, "request {i} of the other tenant waits for {turns:?} turns");
    }
    world.finish();
}

/// Two tenants keep `open` requests open for `turns` turns; returns the number of requests of each that ended. The
/// requests of tenant 2 are turns of as many sessions, whose prefixes are cached on engine 1 only.
fn served(open: [usize; 2], turns: usize) -> [usize; 2] {
    let sizes = Sizes { max_num_seqs: 32, kv_blocks: 40_000, step_tokens: 4096, ..Sizes::default() };
    let mut world = World::with_sizes(&[sizes; 2]);
    let session = |session: usize| text(900 + session as u32, 12_800);
    let on_engine_1 = |prompt: Vec<u32>| GenerateRequest { engine: Some(1), ..of(2, request(&prompt, 1)) };
    let first: Vec<_> = (0..open[1]).map(|number| world.submit(on_engine_1(session(number)))).collect();
    world.finish();
    drop(first);
    let mut streams: [Vec<Option<TokenStream>>; 2] = open.map(|open| (0..open).map(|_| None).collect());
    let (mut ended, mut number) = ([0; 2], 0);
    for _ in 0..turns {
        for (tenant, streams) in streams.iter_mut().enumerate() {
            for (place, stream) in streams.iter_mut().enumerate() {
                if let Some(open) = stream {
                    if !ready(open).contains('f') {
                        continue;
                    }
                    ended[tenant] += 1;
                }
                number += 1;
                let own = text(number % 900, 160);
                let prompt = if tenant == 0 { own } else { [session(place), own].concat() };
                *stream = Some(world.submit(of(tenant as u64 + 1, request(&prompt, 40))));
            }
        }
        world.turn();
    }
    ended
}

#[test]
fn a_tenant_whose_sessions_are_on_one_engine_has_its_share_of_all() {
    // 64 requests run at once: a fair share is one half, or all open requests of a tenant with fewer.
    for (open, fair) in [([32, 32], 0.5), ([128, 24], 24.0 / 64.0)] {
        let [one, other] = served(open, 4000);
        println!("{open:?}: {one} and {other} requests");
        let share = other as f64 / (one + other) as f64;
        assert!(share > 0.85 * fair, "{open:?}: {one} and {other} requests");
    }
}

/// Service of a tenant.
#[derive(Debug, Default)]
struct Service {
    /// Generated tokens.
    tokens: usize,
    /// Time of each request from its arrival until it first runs.
    waits: Vec<Duration>,
}

impl Service {
    fn mean_wait(&self) -> Duration {
        self.waits.iter().sum::<Duration>() / self.waits.len() as u32
    }

    /// The time that 99 of 100 requests do not exceed.
    fn p99_wait(&self) -> Duration {
        let mut waits = self.waits.clone();
        waits.sort_unstable();
        waits[waits.len() * 99 / 100]
    }
}

/// Two tenants keep `open` requests open for three seconds, on `engines` engines that run 64 requests together.
fn service(engines: usize, open: [usize; 2]) -> [Service; 2] {
    let sizes = Sizes {
        max_num_seqs: 64 / engines,
        kv_blocks: 16_000 / engines,
        step_tokens: 4096 / engines,
        ..Sizes::default()
    };
    let mut world = World::with_sizes(&vec![sizes; engines]);
    let mut service = [Service::default(), Service::default()];
    let mut streams: Vec<(usize, Option<Duration>, Option<TokenStream>)> =
        open.iter().enumerate().flat_map(|(tenant, open)| (0..*open).map(move |_| (tenant, None, None))).collect();
    let mut number = 0;
    while world.now() < Duration::from_secs(3) {
        for (tenant, sent, stream) in &mut streams {
            let events = stream.as_mut().map_or("f".to_owned(), ready);
            service[*tenant].tokens += events.matches('t').count();
            if events.contains('a') {
                service[*tenant].waits.extend(sent.take().map(|sent| world.now() - sent));
            }
            if events.contains('f') {
                number += 1;
                let (prompt, tokens) = (text(number as u32 % 900, 100 + number * 37 % 120), 20 + number * 13 % 41);
                // A salt of its own, so that no prefix is cached.
                let own = GenerateRequest { cache_salt: number as u64, ..request(&prompt, tokens) };
                (*sent, *stream) = (Some(world.now()), Some(world.submit(of(*tenant as u64 + 1, own))));
            }
        }
        world.turn();
    }
    service
}

/// One tenant has ten times as many requests open as the other one. All requests of the smaller one can run at
/// once, or both wait. Two engines give each the share of one queue, and waits that are at most a quarter and a step
/// longer.
#[test]
fn tenants_of_two_engines_get_what_they_get_from_one_queue() {
    let step = Duration::from_millis(1);
    for open in [[160, 16], [400, 40]] {
        let [one, two] = [1, 2].map(|engines| service(engines, open));
        let share = |[large, small]: &[Service; 2]| small.tokens as f64 / (large.tokens + small.tokens) as f64;
        let shares = [&one, &two].map(share);
        assert!((shares[0] - shares[1]).abs() < 0.01, "{open:?}: {shares:?} of the tokens");
        for (one, two) in one.iter().zip(&two) {
            for (one, two) in [(one.mean_wait(), two.mean_wait()), (one.p99_wait(), two.p99_wait())] {
                assert!(two < one.mul_f64(1.25) + step, "{open:?}: {two:?} instead of {one:?}");
            }
        }
    }
}
