//! A rank that fails in the middle of a step ends the step of all ranks and is named. So is a rank with different
//! results, if ranks are compared. A slow rank is waited for.
//!
//! The module that includes this file names the `Family` and its [`Faults`] as `FAULTS`.

use super::{FAULTS, Family};
use crate::support::{best, fixture, greedy, model_path, rank_counts, run};
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::Shard;
use pegainfer_core::tensor::{Element, Tensor};
use pegainfer_core::weights::Source;
use pegainfer_runtime::{Bounds, Executor, LoadOptions, Model, StepSize, load, load_rank_weights, uniform};
use std::time::{Duration, Instant};

/// Faults of one rank of a model, and what its users see.
pub struct Faults<M: Model> {
    /// Gives a weight of a middle layer a shape that its op refuses, and the start of the error.
    pub refused: (fn(&mut Exec, &mut M::Weights), &'static str),
    /// Removes the last layer.
    pub shorter: fn(&mut M::Weights),
    /// Changes a value of a weight that all ranks have, see [`double`], and the error.
    pub different: (fn(&mut Exec, &mut M::Weights), &'static str),
    /// An op and the time that each call takes longer, at least five seconds for 25 steps.
    pub slow: (&'static str, Duration),
    /// Options of an engine.
    pub options: fn() -> LoadOptions<M::Options>,
}

/// Doubles element 100 of `tensor`.
pub fn double<T: Element + Default>(exec: &mut Exec, tensor: &mut Tensor, twice: fn(T) -> T) {
    let mut value = [T::default()];
    exec.read(tensor, 100, &mut value).unwrap();
    exec.write(tensor, 100..101, |_, out| out[0] = twice(value[0])).unwrap();
}

/// True unless the ranks run on GPUs and there is only one.
fn has_two_ranks() -> bool {
    rank_counts(&[2]).contains(&2)
}

/// The error of a step on two ranks, the second modified by `change`; the next step has the same one.
fn error_of(change: impl FnOnce(&mut Exec, &mut <Family as Model>::Weights)) -> String {
    let config = Family::load_config(&model_path()).unwrap();
    let source = Source::open(&model_path()).unwrap();
    let mut ranks: Vec<_> = best().execs(2).into_iter().zip(Shard::all(2)).collect();
    let mut weights = load_rank_weights::<Family>(&mut ranks, &config, &source, &mut |_| {}).unwrap();
    change(&mut ranks[1].0, &mut weights[1]);
    let ranks = ranks.into_iter().zip(weights).map(|((exec, shard), weights)| (exec, shard, weights)).collect();
    let size = StepSize { tokens: 64, rows: 2, samples: 2, context: 256 };
    let bounds = Bounds { slots: 4, ..Bounds::exact(size, 32) };
    let mut executor = Executor::<Family>::new(config, ranks, &bounds).unwrap();
    executor.check_ranks();
    let (step, start) = (uniform::<Family>(2, 8, 8), Instant::now());
    let error = executor.run(&step).unwrap_err().to_string();
    assert!(start.elapsed() < Duration::from_secs(60), "the other rank waited");
    assert_eq!(executor.run(&step).unwrap_err().to_string(), error, "no step runs after a failure");
    error
}

/// Fails after the first exchange.
#[test]
fn a_rank_that_fails_between_two_layers_ends_the_step() {
    if has_two_ranks() {
        let error = error_of(FAULTS.refused.0);
        assert!(error.starts_with(FAULTS.refused.1), "{error}");
    }
}

/// A rank that leaves out a layer is at another exchange than the others.
#[test]
fn a_rank_that_is_out_of_step_is_seen() {
    if has_two_ranks() {
        let error = error_of(|_, weights| (FAULTS.shorter)(weights));
        // On GPUs its part of an exchange never arrives.
        assert!(["rank 0", "rank 1", "out of step"].iter().any(|reason| error.contains(reason)), "{error}");
    }
}

#[test]
fn a_rank_that_computes_something_else_is_seen() {
    if has_two_ranks() {
        assert_eq!(
            error_of(FAULTS.different.0),
            format!("check_ranks: rank 1 and rank 0 differ in {}", FAULTS.different.1)
        );
    }
}

/// The other rank waits: less than its timeout at each exchange.
#[test]
fn a_slow_rank_is_waited_for() {
    if !has_two_ranks() {
        return;
    }
    let request = [greedy(&fixture().cases[0].prompt_ids, 24)];
    let finished = |slow: Option<(&'static str, Duration)>| {
        let mut execs = best().execs(2);
        if let Some((op, time)) = slow {
            execs[1].slow_down(op, time);
        }
        let start = Instant::now();
        let mut engine = load::<Family>(execs, &(FAULTS.options)(), &mut |_, _| {}).unwrap().engine;
        (run(&mut engine, &request).remove(0), start.elapsed())
    };
    let ((expected, _), (found, time)) = (finished(None), finished(Some(FAULTS.slow)));
    assert!(time >= Duration::from_secs(5), "{time:?}");
    assert_eq!((found.ids(), found.end), (expected.ids(), expected.end));
}
