//! The schedules of random worlds, recorded as lines and replayed without their clients, their device and their faults.

use super::executor::Spoil;
use super::fault::Allowed;
use super::report::Report;
use super::tight::Tight;
use super::world::World;
use super::{TURNS, compute_masks_here};
use crate::kinds::{InPlace, KvOnly, Recurrent, StepOf};
use pegainfer_core::engine::StepEngine;
use pegainfer_core::schedule::recording::{
    EngineSetup, Plan, ReplayError, Replayed, ScheduleEvent, ScheduleSink, replay,
};
use std::sync::{Arc, Mutex};

/// Worlds of each kind of model.
const WORLDS: u64 = 40;

/// Keeps the lines of a recording.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl ScheduleSink for Lines {
    fn record(&mut self, event: ScheduleEvent) {
        self.0.lock().unwrap().push(serde_json::to_string(&event).unwrap());
    }
}

/// The recorded lines of the world of `seed`, and its report.
fn recorded<K: Spoil + Send + 'static>(seed: u64) -> (Vec<String>, Report)
where
    StepOf<K>: Send,
{
    let lines = Lines::default();
    let mut world = World::<K>::new(seed, &Allowed::from_env());
    world.engine.engine().engine.record_schedule(Box::new(lines.clone()));
    let report = world.run(TURNS);
    (Arc::into_inner(lines.0).unwrap().into_inner().unwrap(), report)
}

fn replay_lines(lines: &[String]) -> Result<Replayed, ReplayError> {
    replay(lines.iter().map(|line| serde_json::from_str(line).unwrap()))
}

/// Replays worlds of one kind; returns the number of equal steps.
fn replays<K: Spoil + Send + 'static>() -> Report
where
    StepOf<K>: Send,
{
    let (mut total, mut drafting) = (Report::default(), 0);
    for seed in 0..WORLDS {
        let (lines, report) = recorded::<K>(seed);
        match replay_lines(&lines) {
            Ok(Replayed { preemptions, prefix_hits, .. }) => {
                let counted = (report.stats.preemptions, report.stats.prefix_hits);
                assert_eq!((preemptions, prefix_hits), counted, "seed {seed}");
                total.add(&report);
            }
            Err(ReplayError::Speculation) => drafting += 1,
            Err(error) => panic!("seed {seed}: {error}"),
        }
    }
    assert!(drafting < WORLDS / 2 && (K::DRAFTS == (drafting > 0)), "{drafting} worlds draft");
    total
}

#[test]
fn recorded_schedules_replay() {
    compute_masks_here();
    let mut total = Report::default();
    for report in [replays::<KvOnly>(), replays::<Recurrent>(), replays::<InPlace>(), replays::<Tight>()] {
        total.add(&report);
    }
    let stats = total.stats;
    let counts = [
        stats.preemptions,
        stats.prefix_hits,
        total.hangups,
        total.failed_steps,
        total.failed,
        total.broken,
        total.lost,
    ];
    assert!(stats.steps > 10_000 && counts.iter().all(|count| *count > 5), "the worlds are too easy: {total}");
}

/// Kind of a line.
fn is(line: &str, kind: &str) -> bool {
    line.starts_with(&format!("{{\"{kind}\""))
}

/// The events of the first world that has a long schedule without drafts.
fn long_schedule() -> Vec<String> {
    let lines = (0..).map(|seed| recorded::<KvOnly>(seed).0);
    let is_long = |lines: &Vec<String>| replay_lines(lines).is_ok_and(|replayed| replayed.steps > 100);
    lines.into_iter().find(is_long).unwrap()
}

#[test]
fn a_schedule_that_was_changed_does_not_replay() {
    compute_masks_here();
    let lines = long_schedule();
    for kind in ["engine", "queue", "plan", "commit"] {
        let first = lines.iter().position(|line| is(line, kind)).unwrap();
        let mut changed = lines.clone();
        changed.remove(first);
        assert!(replay_lines(&changed).is_err(), "without {}", lines[first]);
    }
    type Change = fn(&mut EngineSetup, &mut Plan);
    let changes: [Change; 5] = [
        |setup, _| setup.kv_blocks = 1,
        |setup, _| setup.max_num_batched_tokens = setup.max_num_seqs,
        |_, plan| plan.hash += 1,
        |_, plan| plan.rows.as_mut().unwrap()[0].1 += 1,
        |_, plan| plan.rows = None,
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let mut events: Vec<ScheduleEvent> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        let (first, rest) = events.split_first_mut().unwrap();
        let ScheduleEvent::Engine(setup) = first else { panic!("{first:?}") };
        let plans = rest.iter_mut().filter_map(|event| match event {
            ScheduleEvent::Plan(plan) => Some(plan),
            _ => None,
        });
        change(setup, plans.into_iter().find(|plan| plan.hash > 0).unwrap());
        let error = replay(events).map(|_| ()).unwrap_err();
        assert!(matches!(error, ReplayError::Differs { .. }), "change {i}: {error}");
    }
}

#[test]
fn a_recording_of_a_running_engine_is_refused() {
    let mut event: ScheduleEvent = serde_json::from_str(&recorded::<Recurrent>(0).0[0]).unwrap();
    let ScheduleEvent::Engine(setup) = &mut event else { panic!("{event:?}") };
    (setup.speculation, setup.steps) = (false, 3);
    assert_eq!(replay([event]), Err(ReplayError::NotFromTheStart { steps: 3 }));
}
