//! Drives a whole engine through random faults under a virtual clock: handle, engine loop, engine, demultiplexer and
//! token streams, all on one thread. The device is the one of the scheduler tests. Its tokens depend on every KV slot
//! that it reads, so data of another request, of a failed step or from before a preemption shows as a wrong token.
//!
//! A world depends only on its seed, which a failure prints:
//!
//! - `PEGAINFER_TEST_SEED=n` starts with this seed; each world increments it.
//! - `PEGAINFER_TEST_STEPS=n` runs this many steps of each kind of model; 1 runs one world.
//! - `PEGAINFER_TEST_FAULTS=hangup,reset` allows only these faults, with the same draws, to find out which ones a
//!   failure needs.

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
/// Number of turns in which requests arrive.
const TURNS: usize = 2000;

fn number(variable: &str) -> Option<u64> {
    let value = std::env::var(variable).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{variable} is no number: {value}")))
}

/// Runs worlds of one kind and reports what happened.
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

/// Computes grammar masks on this thread: the rayon pool has no other one and computes only on demand.
fn compute_masks_here() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build().unwrap();
    // The pool lives as long as the thread.
    std::mem::forget(pool);
}

/// Checks that each kind of fault happened, unless the run is short or excludes some.
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
