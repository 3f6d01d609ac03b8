//! A kernel that becomes slow while the engine runs is named.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use pegainfer_core::engine::StepEngine;
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::ledger::{Cause, Effort, Law, OpShares, StepLog, Watch};
use pegainfer_kernels::runtime::{LoadOptions, load, measure};
use pegainfer_qwen3_4b::Qwen3;
use std::time::Duration;
use support::{fixture, greedy, options, run};

/// Steps of each run.
const TOKENS: usize = 120;
/// Time that each call of the slow op takes longer.
const SLOW: Duration = Duration::from_millis(4);

fn slow_steps(log: &StepLog, cause: Cause) -> u64 {
    log.anomalies().iter().find(|(other, _)| *other == cause).unwrap().1
}

#[test]
fn a_planted_slowdown_is_named() {
    let options =
        LoadOptions { max_model_len: Some(512), max_num_seqs: Some(2), max_num_batched_tokens: Some(64), ..options() };
    let exec = Exec::cpu(Isa::best(), Some(1)).unwrap();
    let mut engine = load::<Qwen3>(exec, &options, &mut |_, _| {}).unwrap().engine;
    let effort = Effort { per_step: Duration::from_millis(20), refine: Duration::ZERO };
    let measured = measure::<Qwen3>(&mut engine, false, effort, &mut |_| {}).unwrap();
    assert!(measured.ops.iter().any(|line| line.op == "linear_swiglu" && line.calls > 1 && line.us > 0.0));

    let log = engine.step_log().unwrap();
    log.watch(Watch::new(Law::new(&measured.steps, false).unwrap(), OpShares::new(&measured.ops)));
    let request = greedy(&fixture().cases[0].prompt_ids, TOKENS);
    run(&mut engine, std::slice::from_ref(&request));
    let steps = log.last(usize::MAX);
    assert!(steps.len() >= TOKENS && steps.iter().all(|step| step.took > Duration::ZERO));
    assert!(steps.iter().all(|step| step.predicted_us.is_some_and(|us| us > 0.0)), "all were measured");
    assert_eq!(slow_steps(&log, Cause::Op), 0, "{:?}", log.last_anomaly());

    engine.executor().exec().slow_down("linear_swiglu", SLOW);
    run(&mut engine, &[request]);
    assert!(slow_steps(&log, Cause::Op) > 0, "{:?}", log.last_anomaly());
    let anomaly = log.last_anomaly().unwrap();
    let (op, us) = anomaly.op.clone().unwrap();
    assert_eq!(op, "linear_swiglu", "{anomaly}");
    let layers = engine.executor().config().layers;
    let planted = layers as f64 * SLOW.as_secs_f64() * 1e6;
    assert!(us > 0.5 * planted && us < 3.0 * planted, "{anomaly}: {us} us, planted {planted}");
}
