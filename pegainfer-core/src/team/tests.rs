use super::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Runs a loop on the current team and checks that each index ran once.
fn check(count: usize) {
    let ran: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
    for_each(count, |i| {
        ran[i].fetch_add(1, Ordering::Relaxed);
    });
    assert!(ran.iter().all(|ran| ran.load(Ordering::Relaxed) == 1), "{count} indices");
}

#[test]
fn each_index_runs_once_on_teams_of_any_size() {
    for threads in [1, 2, 3, 16, 64] {
        let team = Team::new(threads).unwrap();
        team.install(|| {
            assert_eq!(super::threads(), threads);
            (0..200).for_each(|i| check(i % 70));
            check(10_000);
        });
    }
}

#[test]
fn sleeping_threads_take_part_in_a_loop() {
    let team = Team::new(2).unwrap();
    team.install(|| {
        for _ in 0..20 {
            std::thread::sleep(2 * worker::SPIN);
            // Ends only if two threads run it at once.
            let both = std::sync::Barrier::new(2);
            for_each(2, |_| {
                both.wait();
            });
        }
    });
}

#[test]
fn a_caller_sleeps_until_a_long_task_ends() {
    let team = Team::new(2).unwrap();
    let (caller, ended) = (std::thread::current().id(), AtomicUsize::new(0));
    let both = std::sync::Barrier::new(2);
    team.install(|| {
        for_each(2, |_| {
            both.wait();
            if std::thread::current().id() != caller {
                std::thread::sleep(Duration::from_millis(5));
            }
            ended.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(ended.load(Ordering::Relaxed), 2);
    });
}

#[test]
fn loops_inside_tasks_outside_teams_and_of_other_threads_run_in_place() {
    assert_eq!(threads(), 1);
    check(100);
    let team = Team::new(3).unwrap();
    team.install(|| {
        for_each(5, |_| {
            assert_eq!(threads(), 1);
            check(50);
        });
        check(50);
    });
    // Two threads that share a team.
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| team.install(|| (0..1000).for_each(|i| check(i % 9))));
        }
    });
}

#[test]
fn panics_reach_the_caller_and_the_team_goes_on() {
    let team = Team::new(4).unwrap();
    team.install(|| {
        for bad in [0, 7, 99] {
            let ended = AtomicUsize::new(0);
            let ran = catch_unwind(AssertUnwindSafe(|| {
                for_each(100, |i| {
                    assert_ne!(i, bad, "index {i}");
                    ended.fetch_add(1, Ordering::Relaxed);
                });
            }));
            let message = ran.unwrap_err().downcast::<String>().unwrap();
            assert!(message.contains(&format!("index {bad}")), "{message}");
            assert_eq!(ended.load(Ordering::Relaxed), 99);
            check(100);
            assert_eq!(threads(), 4);
        }
    });
}

#[test]
fn chunks_are_those_of_the_slices() {
    let team = Team::new(3).unwrap();
    team.install(|| {
        let (mut a, mut b) = (vec![0; 103], vec![0; 21]);
        for_each_chunk(&mut a, 10, |i, chunk| chunk.fill(i));
        assert!(a.iter().enumerate().all(|(at, i)| at / 10 == *i));
        for_each_chunk_pair((&mut a, 10), (&mut b, 2), |i, a, b| {
            a.fill(i + 1);
            b.fill(i + 2);
        });
        assert!(a.iter().enumerate().all(|(at, i)| at / 10 + 1 == *i));
        assert!(b.iter().enumerate().all(|(at, i)| at / 2 + 2 == *i));
        for_each_chunk(&mut [0u8; 0], 1, |_, _| panic!("no chunks"));
    });
}
