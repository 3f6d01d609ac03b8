//! Simulations with results that can be computed by hand.

use super::report::{ANOTHER_CARD, figures};
use super::simulation::Simulation;
use super::tiers::TierSizes;
use super::workload::Workload;
use super::world::{FrontEnd, Requests, Run, Sending, SessionStart, Turn};
use crate::bench::workload::{Arrivals, Point};
use crate::shipped::{self, ShippedArgs};
use pegainfer_core::ledger::{Header, HostCost, Ledger, OpLine, StepLine, StepLoad};
use pegainfer_core::schedule::StateConfig;
use std::time::Duration;

/// Microseconds of a decode step, and per token of a chunk.
const DECODE: f64 = 1000.0;
const TOKEN: f64 = 100.0;

/// A ledger of a device that takes 1 ms for a decode step of any size and 0.1 ms per chunk token.
fn ledger(depth: usize, state: Option<StateConfig>) -> Ledger {
    let line = |rows: &[(usize, usize)], us| {
        let load = StepLoad::of_rows(rows.iter().copied());
        StepLine { load, us, spread: 0.0, runs: 1 }
    };
    let header = Header {
        version: Header::VERSION,
        program: String::new(),
        kernels: String::new(),
        measured: None,
        model: "m".into(),
        device: "d".into(),
        ranks: 1,
        driver: None,
        quantization: None,
        kv_cache_dtype: "bf16".into(),
        kv_blocks: 64,
        block_size: 16,
        max_model_len: 512,
        vocab_size: 1000,
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_num_mixed_tokens: 64,
        depth,
        graphs: false,
        state,
    };
    let decode = [1, 4].map(|rows| line(&vec![(1, 512); rows], DECODE));
    let prefill = [2, 64].map(|tokens| line(&[(tokens, tokens)], tokens as f64 * TOKEN));
    let steps: Vec<StepLine> = decode.into_iter().chain(prefill).collect();
    let op = |us| OpLine { load: steps[0].load, op: "linear".into(), calls: 1, us, ..OpLine::default() };
    let (ops, kernels) = (vec![op(1.0)], Vec::new());
    Ledger { header, host: HostCost::default(), config: None, anchor: None, ops, kernels, steps }
}

fn simulate(ledger: &Ledger, sending: Sending, lengths: &[(usize, usize)], front_end: FrontEnd) -> Run {
    let simulation = Simulation::new(ledger).unwrap();
    let (count, lengths) = (lengths.len(), |i: usize| lengths[i]);
    let prompt = |i: usize| vec![i as u32; lengths(i).0].into();
    let none = Requests { count: 0, sending: Sending::At(vec![]), lengths: &lengths, prompt: &prompt };
    let requests = Requests { count, sending, lengths: &lengths, prompt: &prompt };
    simulation.run(&none, &requests, front_end, true).unwrap()
}

fn at(milliseconds: &[u64]) -> Sending {
    Sending::At(milliseconds.iter().map(|ms| Duration::from_millis(*ms)).collect())
}

fn assert_close(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-6, "{a} is not {b}");
}

/// Milliseconds from a request's start to its first token.
fn first_token(run: &Run, request: usize) -> f64 {
    run.measurements.samples[request].first.as_secs_f64() * 1e3
}

/// Milliseconds from the start of a run's only request to each of its tokens.
fn stamps(run: &Run) -> Vec<f64> {
    let mut stamps = vec![first_token(run, 0)];
    stamps.extend(run.measurements.gaps.iter().scan(stamps[0], |at, gap| {
        *at += gap.as_secs_f64() * 1e3;
        Some(*at)
    }));
    stamps
}

#[test]
fn one_request_takes_its_prefill_and_its_decode_steps() {
    for depth in [1, 2] {
        let run = simulate(&ledger(depth, None), at(&[0]), &[(32, 4)], FrontEnd::default());
        let tokens = stamps(&run);
        for (token, ms) in tokens.iter().zip([3.2, 4.2, 5.2, 6.2]) {
            assert_close(*token, ms);
        }
        assert_eq!((tokens.len(), run.measurements.samples[0].tokens, run.refused), (4, 4, 0));
        assert_eq!(run.tally.steps[..2], [3, 1]);
        assert_close(run.tally.busy() * 1e3, 6.2);
        assert_close(run.tally.ops[0] * 1e3, 3.0);
        assert_eq!(run.timeline.len(), 4);
        assert!(run.timeline.windows(2).all(|pair| pair[0].end <= pair[1].begin));
    }
}

#[test]
fn a_prompt_longer_than_a_step_is_computed_in_chunks() {
    let run = simulate(&ledger(1, None), at(&[0]), &[(100, 1)], FrontEnd::default());
    assert_eq!(run.tally.steps, [0, 2, 0]);
    assert_close(first_token(&run, 0), 10.0);
}

/// Two prompts of 448 tokens take turns in a pool for 512: 7 steps of 64 tokens take 44.8 ms.
#[test]
fn evicted_blocks_are_loaded_when_that_is_faster() {
    let ledger = Ledger { header: Header { kv_blocks: 32, ..ledger(1, None).header }, ..ledger(1, None) };
    let run = |tiers| {
        let mut simulation = Simulation::new(&ledger).unwrap();
        simulation.tiers = tiers;
        let prompt = |i: usize| vec![i as u32 % 2; 449].into();
        let lengths = |_: usize| (449, 1);
        let none = Requests { count: 0, sending: Sending::At(vec![]), lengths: &lengths, prompt: &prompt };
        let sending = at(&[0, 200, 400, 600, 800, 1000]);
        simulation.run(&none, &Requests { count: 6, sending, ..none }, FrontEnd::default(), false)
    };
    let first = |run: &Run| (0..6).map(|i| first_token(run, i)).collect::<Vec<_>>();
    let plain = run(None).unwrap();
    // The pool still has the first three blocks of the other prompt.
    assert!(first(&plain)[2..].iter().all(|ms| (40.0..41.0).contains(ms)), "{:?}", first(&plain));
    let sizes = TierSizes { host_tokens: 1024, host_rate: 100_000.0, disk_tokens: 0, disk_rate: 1.0, state_tokens: 0 };
    let loaded = run(Some(sizes)).unwrap();
    // 25 blocks in 4 ms, and a token that is computed in 1 ms.
    assert!(first(&loaded)[2..].iter().all(|ms| (4.0..6.0).contains(ms)), "{:?}", first(&loaded));
    assert!((4 * 25 * 16..=4 * 28 * 16).contains(&loaded.stats.tiers.hits), "{:?}", loaded.stats.tiers);
    // Slower than to compute: the first load shows it.
    let slow = run(Some(TierSizes { host_rate: 5_000.0, ..sizes })).unwrap();
    assert!(first(&slow)[3..].iter().all(|ms| *ms < 50.0), "{:?}", first(&slow));
    // Host memory for one prompt, a file for both.
    let file = TierSizes { host_tokens: 512, disk_tokens: 2048, disk_rate: 50_000.0, ..sizes };
    let read = run(Some(file)).unwrap();
    assert!(first(&read)[2..].iter().all(|ms| (9.0..25.0).contains(ms)), "{:?}", first(&read));
    assert!(read.stats.tiers.read_blocks > 0);
}

#[test]
fn the_front_end_delays_what_a_client_sees_and_not_the_device() {
    let front_end = FrontEnd {
        request: Duration::from_millis(2),
        token: Duration::from_micros(10),
        event: Duration::from_millis(1),
    };
    let run = simulate(&ledger(1, None), at(&[5]), &[(32, 2)], front_end);
    assert_close(first_token(&run, 0), 2.0 + 0.32 + 3.2 + 1.0);
    assert_close(run.tally.busy() * 1e3, 4.2);
}

#[test]
fn the_engine_threads_own_time_is_hidden_by_steps_in_flight() {
    let with_host = |depth| {
        let mut ledger = ledger(depth, None);
        ledger.host = HostCost { step_us: 400.0, row_us: 100.0 };
        stamps(&simulate(&ledger, at(&[0]), &[(32, 5)], FrontEnd::default()))
    };
    let (one, two) = (with_host(1), with_host(2));
    assert_close(one[4] - one[1], 3.0 * 1.5);
    assert_close(two[4] - two[1], 3.0 * 1.0);
}

#[test]
fn requests_that_never_fit_are_refused_and_the_others_run() {
    let run = simulate(&ledger(1, None), at(&[0, 0]), &[(600, 4), (16, 2)], FrontEnd::default());
    assert_eq!((run.refused, run.measurements.samples.len()), (1, 1));
}

#[test]
fn a_closed_loop_sends_the_next_request_when_one_ends() {
    let run = simulate(&ledger(1, None), Sending::Closed(1), &[(32, 1); 3], FrontEnd::default());
    assert_eq!(run.measurements.samples.len(), 3);
    assert_close(run.wall.as_secs_f64() * 1e3, 3.0 * 3.2);
    assert!((0..3).all(|i| (first_token(&run, i) - 3.2).abs() < 1e-6), "none waits for another");
}

#[test]
fn turns_of_a_session_follow_each_other_and_find_their_prefix() {
    let delay = Duration::from_millis(7);
    let second = Turn { previous: 0, delay, earliest: Duration::ZERO };
    let starts = vec![SessionStart::At(Duration::from_millis(1)), SessionStart::After(second)];
    let simulation = Simulation::new(&ledger(1, None)).unwrap();
    let (lengths, prompt) = (|i: usize| (33 + 16 * i, 1), |i: usize| vec![7; 33 + 16 * i].into());
    let requests = |count, sending| Requests { count, sending, lengths: &lengths, prompt: &prompt };
    let none = requests(0, Sending::At(vec![]));
    let run = simulation.run(&none, &requests(2, Sending::Sessions(starts)), FrontEnd::default(), false).unwrap();
    assert_eq!(run.measurements.samples[1].cached, 32);
    assert_close(
        (run.measurements.samples[1].start - run.measurements.samples[0].start).as_secs_f64() * 1e3,
        3.3 + 7.0,
    );
    assert_close(first_token(&run, 1), 1.7);
    assert_eq!(run.stats.prefix_hits, 32);
}

#[test]
fn turns_without_a_delay_are_sent_at_their_time_or_after_the_turn_before() {
    let turn = |previous, ms| {
        SessionStart::After(Turn { previous, delay: Duration::ZERO, earliest: Duration::from_millis(ms) })
    };
    let starts = vec![SessionStart::At(Duration::ZERO), turn(0, 2), turn(1, 20)];
    let run = simulate(&ledger(1, None), Sending::Sessions(starts), &[(32, 1); 3], FrontEnd::default());
    let sent = |i: usize| (run.measurements.samples[i].start - run.measurements.samples[0].start).as_secs_f64() * 1e3;
    assert_close(sent(1), 3.2);
    assert_close(sent(2), 20.0);
}

#[test]
fn a_model_with_state_slots_runs_and_finds_prefixes_at_its_snapshots() {
    let state = StateConfig { sequences: 4, snapshots: 2, interval: 256, block_tokens: 16, within_chunks: true };
    let simulation = Simulation::new(&ledger(1, Some(state))).unwrap();
    let (lengths, prompt) = (|_| (40, 2), |_| vec![7; 40].into());
    let requests = |count, times: Vec<Duration>| Requests {
        count,
        sending: Sending::At(times),
        lengths: &lengths,
        prompt: &prompt,
    };
    let second = vec![Duration::ZERO, Duration::from_millis(50)];
    let run = simulation.run(&requests(0, vec![]), &requests(2, second), FrontEnd::default(), false).unwrap();
    assert_eq!(run.measurements.samples[1].cached, 32, "the last full block of a prompt has a snapshot");
}

#[test]
fn more_sequences_than_were_measured_are_not_covered() {
    let mut ledger = ledger(1, None);
    ledger.header.max_num_seqs = 8;
    let run = simulate(&ledger, at(&[0; 8]), &[(2, 8); 8], FrontEnd::default());
    assert!(run.tally.uncovered_steps > 0 && run.tally.uncovered > 0.0);
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let simulation = Simulation::new(&ledger(2, None)).unwrap();
    let point = Point { arrivals: Arrivals::Poisson { qps: 100.0 }, requests: 60, prompt_len: 20, output_len: 8 };
    let run = |seed| {
        let run = Workload::Point(point).run(&simulation, seed, false).unwrap();
        (run.wall, (0..60).map(|i| first_token(&run, i)).collect::<Vec<_>>(), run.measurements.gaps)
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3).0, run(4).0);
}

/// Queueing theory: with Poisson arrivals and one request at a time that takes a fixed time, the mean wait is
/// `rho / (2 (1 - rho))` of that time (Pollaczek and Khinchine for M/D/1).
#[test]
fn waiting_times_are_those_of_an_m_d_1_queue() {
    let mut ledger = ledger(1, None);
    (ledger.header.max_num_seqs, ledger.header.max_num_mixed_tokens) = (1, 64);
    let simulation = Simulation::new(&ledger).unwrap();
    // 6.4 ms each, at 70 % of the maximum rate.
    let (service, load) = (6.4, 0.7);
    let qps = load / service * 1e3;
    let point = Point { arrivals: Arrivals::Poisson { qps }, requests: 20_000, prompt_len: 64, output_len: 1 };
    let run = Workload::Point(point).run(&simulation, 5, false).unwrap();
    let waits = (0..point.requests).map(|i| first_token(&run, i) - service);
    let front_end = 0.35 + 64.0 * 38e-6 + 0.05;
    let mean = waits.sum::<f64>() / point.requests as f64 - front_end;
    let expected = load / (2.0 * (1.0 - load)) * service;
    assert!((mean / expected - 1.0).abs() < 0.1, "mean wait {mean} ms, not {expected}");
}

/// Near saturation small differences between cards become large ones: with steps 4 % longer than in the ledger, runs with
/// different arrivals include what was measured on another H200 (docs/operations/capacity.md, "Load").
#[test]
fn near_saturation_another_card_explains_the_difference_to_what_was_measured() {
    let flags = ShippedArgs { gpu: Some("h200".into()), model: Some("qwen3-4b".into()) };
    let mut simulation = Simulation::new(&shipped::read(None, &flags).unwrap()).unwrap();
    let point = Point { arrivals: Arrivals::Poisson { qps: 48.0 }, requests: 720, prompt_len: 1024, output_len: 128 };
    let mut at_pace = |pace| {
        simulation.pace = pace;
        let runs = (1..=6).map(|seed| figures(&Workload::Point(point).run(&simulation, seed, false).unwrap()));
        let mut tpot: Vec<f64> = runs.map(|run| run.tpot_ms.p50).collect();
        tpot.sort_by(f64::total_cmp);
        tpot
    };
    let (own, other) = (at_pace(1.0), at_pace(ANOTHER_CARD));
    let ratio = other[3] / own[3];
    assert!((1.1..1.4).contains(&ratio), "4 % more for each step give {ratio} for TPOT: {own:?}, {other:?}");
    assert!(other[0] < 13.0 && other[5] > 13.0, "13.0 ms were measured: {other:?}");
}
