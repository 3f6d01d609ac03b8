//! Sessions of several turns over several engines: prefix hits and waits, against one large engine and against engines
//! that get requests in turn; and over one whose cache is too small. The engines are Qwen3-4B and Qwen3.5-4B on an H200, by
//! the ledgers inside this program.

use super::simulation::Simulation;
use super::tiers::TierSizes;
use super::world::{FrontEnd, Requests, Run, Sending, SessionStart, Turn};
use crate::shipped::{self, ShippedArgs};
use pegainfer_core::rng;
use std::sync::Arc;
use std::time::Duration;

const SESSIONS: usize = 64;
const TURNS: usize = 8;
const OUTPUT: usize = 120;
/// Tokens of KV of all engines together: about two thirds of what all sessions have at their end.
const KV_TOKENS: usize = 160_000;

/// Tokens that the user adds in this turn of a session.
fn added(seed: u64, session: usize, turn: usize) -> usize {
    let random = rng::bits(rng::bits(seed, session as u64), turn as u64) as usize;
    if turn == 0 { 200 + random % 1500 } else { 20 + random % 400 }
}

/// The prompt of a turn: a common system prompt, then all that was said before and the new tokens.
fn prompt(seed: u64, session: usize, turn: usize) -> Vec<u32> {
    let mut prompt: Vec<u32> = (0..64).collect();
    for earlier in 0..=turn {
        let first = 1000 + (session * TURNS + earlier) as u32 * 37;
        prompt.extend((0..added(seed, session, earlier) as u32).map(|i| first + i % 1009));
        if earlier < turn {
            // Simulated devices sample token 0.
            prompt.extend([0; OUTPUT]);
        }
    }
    prompt
}

fn simulation(model: &str) -> Simulation {
    let flags = ShippedArgs { gpu: Some("h200".into()), model: Some(model.into()) };
    Simulation::new(&shipped::read(None, &flags).unwrap()).unwrap()
}

/// Runs the sessions on engines that share [`KV_TOKENS`]. The sessions begin within `begin`.
fn run(engines: usize, round_robin: bool, begin: Duration, seed: u64) -> Run {
    let mut simulation = simulation("qwen3-4b");
    (simulation.engines, simulation.round_robin) = (engines, round_robin);
    simulation.header.kv_blocks = KV_TOKENS / simulation.header.block_size / engines;
    run_on(&simulation, begin, seed)
}

/// Runs the sessions, which begin within `begin`.
fn run_on(simulation: &Simulation, begin: Duration, seed: u64) -> Run {
    let prompts: Vec<Arc<[u32]>> = (0..SESSIONS * TURNS).map(|i| prompt(seed, i / TURNS, i % TURNS).into()).collect();
    let random =
        |i: usize, below: Duration| below.mul_f64(rng::bits(seed ^ 1, i as u64) as u32 as f64 / f64::from(u32::MAX));
    let starts = (0..SESSIONS * TURNS).map(|i| match i % TURNS {
        0 => SessionStart::At(random(i, begin)),
        _ => {
            let delay = random(i, Duration::from_secs(4));
            SessionStart::After(Turn { previous: i - 1, delay, earliest: Duration::ZERO })
        }
    });
    let sending = Sending::Sessions(starts.collect());
    let (lengths, prompt) = (|i: usize| (prompts[i].len(), OUTPUT), |i: usize| prompts[i].clone());
    let none = Requests { count: 0, sending: Sending::At(vec![]), lengths: &lengths, prompt: &prompt };
    let requests = Requests { count: SESSIONS * TURNS, sending, lengths: &lengths, prompt: &prompt };
    simulation.run(&none, &requests, FrontEnd::default(), false).unwrap()
}

fn hit_rate(run: &Run) -> f64 {
    run.stats.prefix_hits as f64 / run.stats.prefix_queries as f64
}

/// TTFT that 99 % of the requests do not exceed, in milliseconds.
fn p99(run: &Run) -> f64 {
    let mut waits: Vec<f64> = run.measurements.samples.iter().map(|sample| sample.first.as_secs_f64() * 1e3).collect();
    waits.sort_by(f64::total_cmp);
    waits[waits.len() * 99 / 100]
}

#[test]
fn sessions_over_two_engines_find_their_prefixes_and_wait_no_longer_than_in_turn() {
    for (seed, begin) in [(1, 0), (2, 2), (3, 10), (4, 30)] {
        let begin = Duration::from_secs(begin);
        let [one, two, in_turn] =
            [(1, false), (2, false), (2, true)].map(|(engines, round_robin)| run(engines, round_robin, begin, seed));
        let hits = [&one, &two, &in_turn].map(hit_rate);
        let waits = [&one, &two, &in_turn].map(p99);
        assert!(hits[1] >= 0.95 * hits[0], "seed {seed}: {hits:?}");
        assert!(waits[1] <= waits[2], "seed {seed}: {waits:?}");
        assert_eq!(two.measurements.samples.len(), SESSIONS * TURNS);
    }
}

/// A cache for a sixth of what all sessions have at their end, so that requests wait for a place in it.
#[test]
fn copies_in_host_memory_leave_nothing_to_compute_again() {
    // What a turn has in common with the one before. A state is kept at the end of a prompt, before the output.
    let common = |output: usize| -> usize {
        let turns = (0..SESSIONS * TURNS).filter(|i| i % TURNS > 0);
        turns.map(|i| (prompt(1, i / TURNS, i % TURNS - 1).len() + output) / 16 * 16).sum()
    };
    let run = |model: &str, host_tokens, state_tokens| {
        let mut simulation = simulation(model);
        simulation.header.kv_blocks = KV_TOKENS / 4 / simulation.header.block_size;
        let sizes = TierSizes { host_tokens, host_rate: 300_000.0, disk_tokens: 0, disk_rate: 1.0, state_tokens };
        simulation.tiers = (host_tokens > 0).then_some(sizes);
        let run = run_on(&simulation, Duration::from_secs(2), 1);
        let output = if state_tokens > 0 { 0 } else { OUTPUT };
        (run.stats.prefix_hits as f64 / common(output) as f64, p99(&run))
    };
    // A state of Qwen3.5-4B is as large as 1,600 tokens, and twice as many are made as there are turns.
    for (model, host_tokens, state_tokens) in [("qwen3-4b", 2 * KV_TOKENS, 0), ("qwen3.5-4b", 4 * KV_TOKENS, 1600)] {
        let (without, slow) = run(model, 0, 0);
        let (with, fast) = run(model, host_tokens, state_tokens);
        assert!(without < 0.7, "{model}: the cache is large enough: {without}");
        assert!(
            with > 0.95 && fast < slow,
            "{model}: {with} of what was computed before was found; {fast} and {slow} ms"
        );
    }
}

/// A state of Qwen3.5-4B is as large as 1,600 tokens, so that the device keeps few of them: here, three for two sessions.
#[test]
fn the_end_of_each_conversation_keeps_its_state() {
    let mut simulation = simulation("qwen3.5-4b");
    simulation.header.state.as_mut().unwrap().snapshots = SESSIONS * 3 / 2;
    let run = run_on(&simulation, Duration::from_secs(2), 1);
    let turns = (0..SESSIONS * TURNS).filter(|i| i % TURNS > 0);
    let common: usize = turns.map(|i| prompt(1, i / TURNS, i % TURNS - 1).len() / 16 * 16).sum();
    let found = run.stats.prefix_hits as f64 / common as f64;
    assert!(found > 0.95, "{found} of what was computed before was found");
}

/// Single questions with the same long instructions: the first two requests of each kind compute these, others resume
/// behind them.
#[test]
fn prompts_that_begin_alike_share_a_state_where_they_part() {
    const KINDS: usize = 48;
    const REQUESTS: usize = 480;
    let prompt = |i: usize| -> Arc<[u32]> {
        let (kind, own) = ((i % KINDS) as u32, i as u32);
        (0..2008).map(|at| 10_000 + 50 * kind + at % 47).chain((0..500).map(|at| 50_000 + 50 * own + at % 43)).collect()
    };
    let times = (0..REQUESTS).map(|i| Duration::from_millis(100) * i as u32).collect();
    let lengths = |_: usize| (2508, 40);
    let none = Requests { count: 0, sending: Sending::At(vec![]), lengths: &lengths, prompt: &prompt };
    let requests = Requests { count: REQUESTS, sending: Sending::At(times), lengths: &lengths, prompt: &prompt };
    let run = simulation("qwen3.5-4b").run(&none, &requests, FrontEnd::default(), false).unwrap();
    // At least up to the last multiple of the interval.
    let least = (REQUESTS - 2 * KINDS) * 1792;
    assert!(run.stats.prefix_hits as usize >= least, "{} of {least} tokens were found", run.stats.prefix_hits);
}

#[test]
fn twice_the_engines_generate_almost_twice_the_tokens() {
    let rate = |engines: usize| {
        let mut simulation = simulation("qwen3-4b");
        simulation.engines = engines;
        let (lengths, prompt) = (|_| (256, 128), |i: usize| vec![i as u32; 256].into());
        let none = Requests { count: 0, sending: Sending::At(vec![]), lengths: &lengths, prompt: &prompt };
        let (count, sending) = (1024 * engines, Sending::Closed(128 * engines));
        let requests = Requests { count, sending, lengths: &lengths, prompt: &prompt };
        let run = simulation.run(&none, &requests, FrontEnd::default(), false).unwrap();
        (count * 128) as f64 / run.wall.as_secs_f64()
    };
    let (one, two) = (rate(1), rate(2));
    assert!(two > 1.95 * one, "{one:.0} and {two:.0} tokens/s");
}
