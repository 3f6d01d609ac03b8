//! Drives a whole engine through random faults under a virtual clock: handle, loop of the engine thread, engine, demultiplexer
//! and token streams, all on one thread. The device is that of the tests of the scheduler: what it draws depends on every slot of the KV
//! cache that it reads, so that a request that got anything of another one, of a failed step or of a preemption shows as a wrong
//! token.
//!
//! A world is a function of its seed, which a failure prints:
//!
//! - `PEGAINFER_TEST_SEED=n` begins with this seed; the next world has the next one.
//! - `PEGAINFER_TEST_STEPS=n` runs so many steps of each kind of model; 1 runs one world.
//! - `PEGAINFER_TEST_FAULTS=hangup,reset` allows these faults alone, with the same draws: to find which ones a failure needs.

mod arrivals;
mod check;
mod client;
mod executor;
mod fault;
mod report;
mod schedule;
mod tap;
mod tight;
mod world;

use crate::kinds::{InPlace, Kind, KvOnly, Recurrent, StepOf};
use executor::Spoil;
use fault::Allowed;
use report::Report;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tight::Tight;
use world::World;

/// Steps of each kind of model.
const STEPS: u64 = 250_000;
/// Turns in which requests come to a world.
const TURNS: usize = 2000;

fn number(variable: &str) -> Option<u64> {
    let value = std::env::var(variable).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{variable} is no number: {value}")))
}

/// Runs worlds of one kind, and says what happened in them.
fn simulate<K: Spoil + Send + 'static>(name: &str) -> Report
where
    StepOf<K>: Send,
{
    compute_masks_here();
    let now = || std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    let seed = number("PEGAINFER_TEST_SEED").unwrap_or_else(now);
    let steps = number("PEGAINFER_TEST_STEPS").unwrap_or(STEPS);
    let allowed = Allowed::from_env();
    let (mut total, mut worlds, began) = (Report::default(), 0, std::time::Instant::now());
    while total.stats.steps < steps {
        let seed = seed.wrapping_add(worlds);
        match catch_unwind(AssertUnwindSafe(|| World::<K>::new(seed, &allowed).run(TURNS))) {
            Ok(report) => total.add(&report),
            Err(_) => panic!("replay with PEGAINFER_TEST_SEED={seed} PEGAINFER_TEST_STEPS=1 and the name of this test"),
        }
        worlds += 1;
    }
    println!("{name}: seed {seed}, {worlds} worlds in {:.1?}: {total}", began.elapsed());
    total
}

/// Masks of grammars are computed by rayon's threads; the pool of this thread has none but itself, and computes when it is told to.
fn compute_masks_here() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build().unwrap();
    // It lasts as long as the thread.
    std::mem::forget(pool);
}

/// Each kind of fault happened, unless the run is short or has been told to leave some out.
fn check_report<K: Kind>(report: &Report) {
    if std::env::var_os("PEGAINFER_TEST_FAULTS").is_some() || report.stats.steps < STEPS {
        return;
    }
    let counts = [
        report.refused,
        report.hangups,
        report.closed,
        report.failed_steps,
        report.failed,
        report.aborted,
        report.broken,
        report.stuck,
        report.lost,
        report.drained,
        report.stats.prefix_hits,
    ];
    assert!(counts.iter().all(|count| *count > 5), "the worlds are too easy: {report}");
    assert!(report.stats.preemptions > report.stats.steps / K::STEPS_PER_PREEMPTION, "{report}");
}

#[test]
fn an_engine_with_kv_alone_survives_faults() {
    check_report::<KvOnly>(&simulate::<KvOnly>("KV alone"));
}

#[test]
fn an_engine_with_recurrent_states_survives_faults() {
    check_report::<Recurrent>(&simulate::<Recurrent>("recurrent states"));
}

#[test]
fn an_engine_with_states_in_place_survives_faults() {
    check_report::<InPlace>(&simulate::<InPlace>("states in place"));
}

#[test]
fn an_engine_that_preempts_all_the_time_survives_faults() {
    check_report::<Tight>(&simulate::<Tight>("tight KV"));
}

#[test]
fn a_world_is_a_function_of_its_seed() {
    compute_masks_here();
    for seed in 0..50 {
        let run = || World::<Recurrent>::new(seed, &Allowed::from_env()).run(TURNS);
        assert_eq!(run(), run(), "seed {seed}");
    }
}
